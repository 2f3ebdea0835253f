"""Requests of few bytes that ask for much work or memory, each beside small requests of another client: how
long those wait, how much memory the server takes, and whether each answer is right, or a 4xx, and in time.
Usual large requests are among them, which must succeed."""

import base64
import gzip
import http.client
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxsimd.bench.datasets import docstring_pairs
from tests.chaos.findings import Found, Row, table
from tests.chaos.running import Running, running
from tests.checkpoints.bi_encoders import qwen3_wide
from tests.checkpoints.cross_encoders import bert
from tests.checkpoints.language_models import qwen3_reranker
from tests.checkpoints.late_interaction import stanford
from tests.checkpoints.two_towers import clip

# The promises: the longest wait of a small request beyond that of one alone, memory beyond what the server
# had before, and how much later than its timeout an answer may come.
_WAIT_SECONDS, _MEMORY_BYTES, _LATE_SECONDS = 1.0, 1_500_000_000, 1.0
_EVERY_SECONDS, _ALONE_SECONDS = 0.2, 4.0
# How long connections are kept that send no more, or read nothing.
_HELD_SECONDS = 5.0
_PATIENCE_SECONDS = 300.0
_EMBEDDED_DIM, _COLBERT_DIM = 384, 32
_WORDS = [word for pair in docstring_pairs()[:200] for word in pair.document.split()]


@dataclass(frozen=True, slots=True)
class Attack:
    """A request that `clients` send at a time. An answer of 200 has as many `results`, unless that is None.
    One that `must_succeed` is usual. A client with `holds` sends nothing behind that share of its body, and
    reads no answer. `first` is sent before, for what it leaves in the cache."""

    name: str
    path: str
    body: bytes
    results: int | None = None
    clients: int = 1
    timeout: float | None = None
    must_succeed: bool = False
    holds: float | None = None
    first: bytes | None = None
    encoding: str = "identity"


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _vectors(count: int, dim: int, value: float | None = None) -> dict[str, Any]:
    if value is not None:
        numbers = np.full((count, dim), value, dtype="<f4")
        return {"embedding": base64.b64encode(numbers.tobytes()).decode(), "shape": [count, dim]}
    rows = np.random.default_rng(count).integers(-127, 128, (count, dim), dtype=np.int8)
    scales = np.full(count, 1 / 127 / dim**0.5, dtype="<f4")
    return {
        "embedding": base64.b64encode(rows.tobytes()).decode(),
        "shape": [count, dim],
        "dtype": "int8",
        "scales": base64.b64encode(scales.tobytes()).decode(),
    }


def _texts(count: int, words: int, seed: int = 0) -> list[str]:
    draw = random.Random(f"{seed} {count} {words}")
    return [" ".join(draw.choices(_WORDS, k=words)) for _ in range(count)]


def _png(width: int, height: int) -> str:
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = [packer.compress(bytes(1 + width)) for _ in range(height)]
    data = b"".join(rows) + packer.flush()
    chunks = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(each)) + kind + each + struct.pack(">I", zlib.crc32(kind + each))
        for kind, each in chunks
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _on_embedded() -> Iterator[Attack]:
    dim, vector = _EMBEDDED_DIM, [0.1] * _EMBEDDED_DIM
    documents = _texts(1500, 60)
    cached = _json(query="a usual query", documents=documents)

    def ranked(name: str, document: dict[str, Any], **more: Any) -> Attack:
        return Attack(name, "/rerank", _json(query="a", documents=[document], **more), 1)

    def muvera(count: int) -> Attack:
        body = _json(
            input=_texts(count, 12), encoding="muvera", input_type="document",
            muvera={"k_sim": 12, "r_reps": 64, "d_proj": 1}, timeout=2,
        )  # fmt: skip
        return Attack(f"muvera of {count} texts, six at a time", "/v1/embeddings", body, count, 6, 2)

    yield ranked("shape of 60,000 numbers", {"embedding": vector, "shape": [10**18 + 1] * 60_000})
    yield ranked("shape of lists", {"embedding": vector, "shape": [[1] * 5_000_000, 1]})
    yield ranked("dtype of lists", {"embedding": vector, "dtype": [1] * 5_000_000})
    yield ranked("embedding of 5 million numbers", {"embedding": [0.5] * 5_000_000})
    body = _json(query=_vectors(100, dim, 3e38), documents=[_vectors(100, dim, 3e38)])
    yield Attack("vectors that overflow", "/rerank", body, 1)
    many = _vectors(20_000, dim)
    yield Attack("20,000 x 20,000 vectors", "/rerank", _json(query=many, documents=[many]), 1)
    most = _vectors(8192, dim)
    body = _json(query=most, documents=[most], timeout=30, explain=True)
    yield Attack("8,192 x 8,192 vectors, explained", "/rerank", body, 1, timeout=30)
    for rows in (1000, 6000):
        body = _json(query=_vectors(rows, dim), documents=documents, timeout=60)
        name = f"{rows:,} vectors over 1,500 documents"
        yield Attack(name, "/rerank", body, len(documents), 1, 60, must_succeed=rows == 1000, first=cached)
    body = b'{"query": "a", "documents": [{"embedding": [%b]}]}' % b",".join([b"1e-320"] * 2_000_000)
    yield Attack("numbers at the end of the range", "/rerank", gzip.compress(body), encoding="gzip")
    for text in ("a" * 60_000_000, "\\" * 30_000_000):
        body = _json(query="a", documents=[text + "\ud83d"])
        yield Attack(f"{text[:1] * 3} and half of a character", "/rerank", body)
    yield muvera(640)
    yield muvera(40)
    yield Attack("/tokenize of 30 MB", "/tokenize", _json(text="word " * 6_000_000))
    yield Attack("/tokenize of 2 million letters", "/tokenize", _json(text="a" * 2_000_000), clients=4)
    yield Attack("/tokenize of 2 million ideographs", "/tokenize", _json(inputs="\u6f22" * 2_000_000))
    yield Attack("/decode of 200,000 lists", "/decode", _json(ids=[[]] * 200_000), 200_000)
    yield Attack("/decode of 2 million ids", "/decode", _json(ids=[1] * 2_000_000))
    yield Attack("token ids beyond the embedding", "/v1/embeddings", _json(input=[[2**31] * 1000] * 100))
    body = gzip.compress(b"") * 400_000
    yield Attack("400,000 compressed files in a row", "/rerank", body, clients=2, encoding="gzip")
    body = _json(query="a", documents=["word " * 12_000_000])
    yield Attack("five bodies that stop", "/rerank", body, clients=5, holds=0.999)


def _on_colbert() -> Iterator[Attack]:
    many, more = _vectors(30_000, _COLBERT_DIM), _vectors(185_000, _COLBERT_DIM)
    yield Attack("185,000 vectors as a query", "/rerank", _json(query=more, documents=["a"]), 1)
    yield Attack("185,000 vectors as a document", "/rerank", _json(query="a", documents=[more]), 1)
    yield Attack("185,000 x 185,000 vectors", "/rerank", _json(query=more, documents=[more]), 1)
    for explain in (True, "maps"):
        body = _json(query=many, documents=[many], explain=explain)
        yield Attack(f"30,000 x 30,000, explain {explain}", "/rerank", body, 1)
    body = _json(query=_vectors(100, _COLBERT_DIM), documents=_texts(1000, 150), explain=True, timeout=60)
    yield Attack("100,000 matches explained", "/rerank", body, 1000, timeout=60)
    records = [{f"f{i}": [j, {"a": i}] for j in range(20)} for i in range(10_000)]
    fields = [f"f{i}" for i in range(10_000)]
    yield Attack("10,000 rank_fields", "/rerank", _json(query="a", documents=records, rank_fields=fields))
    body = _json(query="a", documents=_texts(10_000, 60))
    yield Attack("10,000 usual documents", "/rerank", body, 10_000, must_succeed=True)
    body = _json(query="a", documents=_texts(2000, 400), stream=True)
    yield Attack("streams that nobody reads", "/rerank", body, clients=10, holds=1.0)


def _on_wide() -> Iterator[Attack]:
    body = _json(input=["a" * 1_000_000])
    yield Attack("a million letters, eight at a time", "/v1/embeddings", body, 1, 8)
    yield Attack("10,000 texts of 4,096 numbers", "/v1/embeddings", _json(input=_texts(10_000, 10)), 10_000)
    body = _json(input=_texts(512, 60))
    yield Attack("512 usual texts", "/v1/embeddings", body, 512, must_succeed=True)
    messages = [{"role": "user", "content": ""}] * 10_000
    yield Attack("a chat of 10,000 messages", "/v1/embeddings", _json(messages=messages))


def _on_reranker() -> Iterator[Attack]:
    for words in (800, 1_000_000):
        body = _json(queries=_texts(2000, 20), documents=_texts(2000, 20), instruction="word " * words)
        body = body[:-1] + b', "timeout": 10}'
        yield Attack(f"N:N, instruction of {words:,} words", "/score", body, 2000, timeout=10)
    letters = "".join(random.Random(0).choices("abcdefghij", k=1_000_000))
    for name, value in (("documents", [letters]), ("instruction", letters)):
        body = _json(**{"query": "a", "documents": ["b"], "timeout": 10, name: value})
        yield Attack(f"a million letters as {name}", "/rerank", body, 1, timeout=10)
    body = _json(query="a b " * 1_000_000, documents=["a"] * 5000, timeout=5)
    yield Attack("query of 4 MB over 5,000 documents", "/rerank", body, 5000, timeout=5)
    body = _json(query="a", documents=_texts(2000, 20), instruction="word " * 800, timeout=10)
    yield Attack("one query, long instruction", "/rerank", body, 2000, timeout=10)


def _on_labels() -> Iterator[Attack]:
    texts = _texts(10_000, 3)
    yield Attack("10,000 texts of 1,000 labels", "/classify", _json(input=texts), 10_000)
    yield Attack("1,000 texts of 1,000 labels", "/predict", _json(inputs=[[text] for text in texts[:1000]]))


def _on_clip() -> Iterator[Attack]:
    for width, height in ((8000, 1), (49_000_000, 1), (1, 1_000_000), (7000, 7000)):
        body = _json(query="a", documents=[{"image": _png(width, height)}])
        yield Attack(f"picture of {width:,} x {height:,}", "/rerank", body, 1, clients=2)
    # Each line has a pixel, and is filled up one by one.
    head = struct.pack("<IiiHHIIiiII", 40, 7000, 7000, 1, 8, 1, 0, 0, 0, 256, 0) + bytes(1024)
    bitmap = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(head)) + head + b"\1\0\0\0" * 7000
    markers = b"\xff\xd8" + b"\xff\xe5\0\2" * 5_000_000
    for name, data in (("a bitmap of 28 kB", bitmap), ("5 million markers", markers)):
        body = _json(query="a", documents=[{"image": base64.b64encode(data).decode()}])
        yield Attack(name, "/rerank", body, 1, clients=2)


_SERVERS: dict[str, tuple[Callable[[Path], str] | None, Callable[[], Iterator[Attack]]]] = {
    "all-MiniLM-L6-v2": (None, _on_embedded),
    "ColBERT": (stanford, _on_colbert),
    "byte-level BPE, 4,096 numbers": (qwen3_wide, _on_wide),
    "CLIP": (clip, _on_clip),
    "Qwen3 reranker": (qwen3_reranker, _on_reranker),
    "classifier of 1,000 labels": (lambda folder: bert(folder, 1000), _on_labels),
}


def _post(port: int, path: str, body: bytes, encoding: str = "identity") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_SECONDS)
    try:
        with suppress(ConnectionError):  # an answer may come before all of the body is read
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _hold(port: int, attack: Attack) -> tuple[int, bytes]:
    """Sends that share of a request, and reads no more than the status of its answer, 0 where none comes."""
    assert attack.holds is not None
    end = time.monotonic() + _HELD_SECONDS
    head = f"POST {attack.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(attack.body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        with suppress(ConnectionError):
            client.sendall(head.encode() + attack.body[: int(len(attack.body) * attack.holds)])
        time.sleep(max(0.0, end - time.monotonic()))
        client.settimeout(0.1)
        try:
            return int(client.recv(16).split()[1]), b""
        except (OSError, IndexError, ValueError):
            return 0, b""


@dataclass
class SmallRequests:
    """Small requests one after another, every 0.2 seconds: how long each has waited, and what was wrong."""

    port: int
    path: str = "/rerank"
    waits: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._send, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _send(self, over: threading.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            texts = [f"{word} {random.random()}" for word in ("one", "two")]
            ranked = _json(query="which one", documents=texts)
            request = ranked if self.path == "/rerank" else _json(input=texts)
            status, body = _post(self.port, self.path, request)
            waited = time.monotonic() - began
            self.waits.append(waited)
            if status != 200:
                self.wrong.append(f"a small request got {status}: {body[:200]!r}")
            over.wait(max(0.0, _EVERY_SECONDS - waited))


def _wrong(attack: Attack, status: int, body: bytes) -> str | None:
    """Why an answer breaks a promise; None if it does not."""
    if attack.holds is not None and status == 0:
        return None
    if status == 504 and attack.timeout is not None and not attack.must_succeed:
        return None
    if 400 <= status < 500 and not attack.must_succeed:
        return None
    if status != 200:
        return f"{status} {body[:200]!r}"
    if attack.results is None:
        return None
    answer = json.loads(body)
    entries = answer if isinstance(answer, list) else answer.get("results", answer.get("data"))
    return None if len(entries) == attack.results else f"{len(entries)} results, not {attack.results}"


def _attacked(server: Running, attack: Attack, small: SmallRequests, alone: float) -> tuple[Row, list[str]]:
    if attack.first is not None:
        _post(server.port, attack.path, attack.first)
    before = server.resident_bytes
    server.forget_peak()

    def send(number: int) -> tuple[float, int, bytes]:
        began = time.monotonic()
        if attack.holds is None:
            status, body = _post(server.port, attack.path, attack.body, attack.encoding)
        else:
            status, body = _hold(server.port, attack)
        return time.monotonic() - began, status, body

    with small.going_on(), ThreadPoolExecutor(attack.clients) as clients:
        time.sleep(_EVERY_SECONDS)
        answers = [*clients.map(send, range(attack.clients))]
    taken, longest = max(0, server.peak_bytes - before), max(small.waits)
    seconds = max(each for each, _, _ in answers)
    broken = [*small.wrong]
    broken += [wrong for _, *answer in answers if (wrong := _wrong(attack, *answer)) is not None]
    if longest > alone + _WAIT_SECONDS:
        broken.append(f"a small request waited for {longest:.2f} s")
    if taken > _MEMORY_BYTES:
        broken.append(f"the server took {taken / 1e9:.2f} GB")
    if attack.timeout is not None and seconds > attack.timeout + _LATE_SECONDS:
        broken.append(f"the answer took {seconds:.1f} s, with a timeout of {attack.timeout:g}")
    statuses = "/".join(str(status or "-") for status in sorted({status for _, status, _ in answers}))
    row = (attack.name, statuses, seconds, longest, taken / 1e6)
    return row, [f"{attack.name}: {each}" for each in broken]


def run(options: Namespace) -> Found:
    """All attacks, or those that `--only` names a part of."""
    tables, broken = [], []
    for name, (build, attacks) in _SERVERS.items():
        rows: list[Row] = [(name, "status", "seconds", "small wait s", "memory MB")]
        with tempfile.TemporaryDirectory(prefix="maxsimd-amplify-") as folder:
            wanted = [each for each in attacks() if options.only is None or options.only in each.name]
            if not wanted:
                continue
            model = None if build is None else build(Path(folder))
            with running(model, "--log-level", "error", hooked=False) as server:
                path = "/classify" if attacks is _on_labels else "/rerank"
                small = SmallRequests(server.port, path)
                with small.going_on():
                    time.sleep(_ALONE_SECONDS)
                alone = max(small.waits[1:])
                rows.append(("(alone)", "-", _ALONE_SECONDS, alone, 0))
                for attack in wanted:
                    row, wrong = _attacked(server, attack, SmallRequests(server.port, path), alone)
                    print(table([row]), file=sys.stderr, flush=True)
                    rows.append(row)
                    broken += [f"{name}: {each}" for each in wrong]
        tables.append(rows)
    return Found(tables, broken)
