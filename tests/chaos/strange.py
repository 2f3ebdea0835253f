"""Strange requests, as hypothesis draws them: HTTP, or nearly, with JSON in it, or nearly."""

import base64
import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

from hypothesis import strategies as st

from maxsimd.api.handlers.routes import ROUTES


@dataclass(frozen=True, slots=True)
class Strange:
    """A request's bytes. To one that is not `complete` a server may wait for more."""

    data: bytes
    complete: bool
    method: str = "POST"


_FIELDS = [
    "query",
    "queries",
    "documents",
    "texts",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
    "input",
    "inputs",
    "text",
    "tokens",
    "prompt",
    "model",
    "top_n",
    "rank_fields",
    "truncate",
    "truncation_side",
    "truncate_prompt_tokens",
    "max_tokens_per_doc",
    "return_documents",
    "use_activation",
    "instruction",
    "priority",
    "timeout",
    "on_timeout",
    "on_error",
    "explain",
    "stream",
    "cache",
    "dimensions",
    "encoding_format",
    "input_type",
    "long_documents",
    "window_overlap",
    "task",
    "normalize",
    "score_threshold",
    "embedding",
    "dtype",
    "shape",
    "scales",
    "messages",
    "embed_dtype",
    "embedding_types",
    "truncation_direction",
    "ids",
]
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "a", "how is a file read", "\ud800", "\0", "[MASK] [SEP]", "🙂" * 20, "e\u0301" * 30]
    ),
    st.builds(lambda word, count: word * count, st.text(min_size=1, max_size=6), st.integers(1, 20_000)),
)
_NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0]),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.dictionaries(st.one_of(st.sampled_from(_FIELDS), st.text(max_size=8)), inner, max_size=5),
    ),
    max_leaves=20,
)
# Of the vectors of the model that is served here, and two of these in float16.
_DIM = 32
_HALVES = base64.b64encode(b"\x00\x2e" * 2 * _DIM).decode()
# A PNG of 2 x 2 pixels, and it beside a text.
_PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAADUlEQVR4nGP4z4AA/wEOAAH/OF9wGgAAAABJRU5ErkJggg=="
_PARTS = (
    {"type": "text", "text": "a text"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PICTURE}"}},
)
# What a body is meant for, and one that is accepted there, or would be by another model.
_USUAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/rerank", {"query": "how is a file read", "documents": ["one text", "another", "a third one"]}),
    ("/score", {"queries": "a", "documents": ["b", "c"]}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}),
    ("/rerank", {"query": "a", "texts": ["b"]}),
    ("/v1/embeddings", {"input": ["a text", "another"]}),
    ("/pooling", {"input": "a text"}),
    ("/tokenize", {"text": "a text"}),
    ("/detokenize", {"tokens": [101, 2000, 102]}),
    ("/predict", {"inputs": [["a", "b"]]}),
    (
        "/rerank",
        {"query": "a", "documents": [{"embedding": _HALVES, "dtype": "float16", "shape": [2, _DIM]}]},
    ),
    ("/score", {"queries": {"embedding": [[0.1] * _DIM]}, "documents": [{"embedding": [0.2] * _DIM}, "b"]}),
    ("/v1/ranking", {"query": {"text": "a"}, "passages": [{"text": "b"}, {"text": "c"}]}),
    ("/v1/reranking", {"query": "a", "input": ["b", "c"]}),
    ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float", "binary"]}),
    ("/infinity/rerank", {"query": "a", "documents": ["b", "c"], "return_documents": True}),
    ("/v1/multi-vector", {"input": ["a text", "another"], "embed_dtype": "int8"}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a text"}]}),
    ("/embed_all", {"inputs": ["a text"]}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
    ("/decode", {"ids": [[101, 2000], [102]]}),
    ("/invocations", {"query": "a", "documents": ["b", "c"]}),
    ("/", {"inputs": ["a text"]}),
    ("/rerank", {"query": "a", "documents": [{"image": _PICTURE}, "b", {"text": "c", "image": _PICTURE}]}),
    (
        "/score",
        {"queries": {"image": _PICTURE}, "documents": ["b", {"content": [*_PARTS]}], "explain": "maps"},
    ),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": [*_PARTS]}]}),
    ("/embeddings", {"input": [f"data:image/png;base64,{_PICTURE}"], "modality": "image"}),
    ("/v2/embed", {"images": [f"data:image/png;base64,{_PICTURE}"], "input_type": "image"}),
    ("/v1/multimodalembeddings", {"inputs": [{"content": [*_PARTS]}], "input_type": "document"}),
    ("/invocations", {"query": "a", "documents": [{"image": _PICTURE}]}),
)
_LONGEST = 9 << 20


def _changed(usual: dict[str, Any], changes: dict[str, Any], many: int) -> bytes:
    """A usual body with other values, or with its lists repeated."""
    repeated = {name: value * many if isinstance(value, list) else value for name, value in usual.items()}
    return json.dumps(repeated | changes).encode()[:_LONGEST]


_CHANGES = st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=2)
_MANY = st.sampled_from([1, 1, 1, 1, 7, 100, 3000])


def _nested(opening: str, depth: int) -> bytes:
    return b'{"query": "a", "documents": ' + opening.encode() * depth


_FITTING = st.builds(
    lambda usual, changes, many: (usual[0], _changed(usual[1], changes, many)),
    st.sampled_from(_USUAL),
    st.one_of(st.just({}), _CHANGES),
    _MANY,
)


def _noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


_BODIES = st.one_of(
    st.builds(lambda value: json.dumps(value).encode()[:_LONGEST], _VALUES),
    st.builds(_nested, st.sampled_from(["[", '{"a":', '[{"text":', "[["]), st.integers(1, 100_000)),
    st.builds(
        lambda digits: b'{"query": "a", "documents": ["b"], "top_n": ' + b"9" * digits + b"}",
        st.integers(1, 9999),
    ),
    st.builds(_noise, st.integers(0, 1 << 32), st.one_of(st.integers(0, 2000), st.integers(0, 900_000))),
    st.builds(
        lambda body, end: json.dumps(body[1]).encode()[:end], st.sampled_from(_USUAL), st.integers(0, 60)
    ),
    st.binary(max_size=300),
)
_NAMES = st.one_of(
    st.sampled_from(
        [
            "content-type",
            "content-encoding",
            "accept",
            "expect",
            "x-request-id",
            "origin",
            "authorization",
            "accept-encoding",
            "connection",
            "upgrade",
            "cookie",
            "range",
            "te",
            "x-forwarded-for",
        ]
    ),
    st.text("abcdefghijklmnopqrstuvwxyz-_!#$%&'*+.^`|~0123456789", min_size=1, max_size=20),
)
_HEADER_VALUES = st.one_of(
    st.sampled_from(
        [
            "application/json",
            "text/plain",
            "gzip",
            "br",
            "deflate, gzip",
            "100-continue",
            "close",
            "websocket",
            "",
            "x" * 20_000,
            "Bearer x",
            "*",
            "bytes=0-1",
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60),
)
_PATHS = st.one_of(
    st.sampled_from(sorted(ROUTES)),
    st.sampled_from(sorted(ROUTES)),
    st.builds(
        lambda path, end: path + end,
        st.sampled_from(sorted(ROUTES)),
        st.sampled_from(["/", "?a=b", "%00", "//", "/.."]),
    ),
    st.builds(lambda raw: "/" + quote_from_bytes(raw, safe="/%?#&=;:@+$,"), st.binary(max_size=60)),
    st.builds(lambda count: "/" + "a" * count, st.integers(1, 20_000)),
)
_METHODS = st.sampled_from(
    ["POST"] * 12 + ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]
)


@st.composite
def requests(draw: st.DrawFn) -> Strange:
    """One request, of whose bytes some may be changed."""
    method = draw(_METHODS)
    path, body = draw(st.one_of(_FITTING, _FITTING, st.tuples(_PATHS, _BODIES)))
    headers = draw(st.lists(st.tuples(_NAMES, _HEADER_VALUES), max_size=4))
    if draw(st.integers(0, 30)) == 0:
        headers *= 60
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    chunked = draw(st.integers(0, 9)) == 0
    if chunked:
        lines.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
    data = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    if draw(st.integers(0, 7)):
        return Strange(data, True, method)
    changed = bytearray(data)
    for position, byte in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(-1, 255)), max_size=8)
    ):
        if byte < 0:
            del changed[position : position + 1]
        else:
            changed[min(position, len(changed)) : position + 1] = bytes([byte])
    return Strange(bytes(changed), False, method)
