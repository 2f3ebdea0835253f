"""text-embeddings-inference's gRPC clients: they get the answers of the HTTP routes."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import httpx
import numpy as np
import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from maxsimd.api.config import SetupError
from maxsimd.api.grpc import tei_pb2 as pb
from maxsimd.api.serve import _open_grpc
from tests.server.conftest import Server, StartServer, free_port, slow_steps
from tests.server.test_serve import certificate  # noqa: F401 (a fixture)
from tests.waiting import wait_for

pytestmark = [pytest.mark.one_process, pytest.mark.not_on_ray]

ROOT = Path(__file__).parents[2]
TEXTS = ["Open the file.", "Close it again, please.", "A river in France."]
LONG = "word " * 3000
LEFT = pb.TRUNCATION_DIRECTION_LEFT
CODES = grpc.StatusCode
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LIST = reflection_pb2.ServerReflectionRequest(list_services="")


class Client:
    """Has the methods of all services in the proto, by name."""

    def __init__(self, address: str, credentials: Any = None) -> None:
        self.address, plain = address, credentials is None
        self.channel = grpc.insecure_channel(address) if plain else grpc.secure_channel(address, credentials)
        for file in (pb, health_pb2, reflection_pb2):
            for service in file.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    setattr(self, method.name, self._call(service.full_name, method))

    def _call(self, service: str, method: Any) -> Any:
        ways = (method.client_streaming, method.server_streaming)
        call = getattr(self.channel, "_".join("stream" if streams else "unary" for streams in ways))
        return call(f"/{service}/{method.name}", _bytes_of, GetMessageClass(method.output_type).FromString)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _bytes_of(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


Served = tuple[Server, Client]


def _started(start: StartServer, *arguments: str, **more: Any) -> Served:
    address = f"127.0.0.1:{free_port()}"
    server = start(*arguments, "--dtype", "float32", "--grpc-port", address.rpartition(":")[2], **more)
    wait_for(lambda: f"gRPC on {address}" in server.log)
    return server, Client(address)


@pytest.fixture(scope="module")
def served(
    module_starter: StartServer, three_label_classifier: str, splade: str, tmp_path_factory: Any
) -> Iterator[Served]:
    """Ranks and embeds, classifies, and gives sparse vectors."""
    config = tmp_path_factory.mktemp("several") / "maxsimd.yaml"
    models = {"embed": {}, "classify": {"model": three_label_classifier}, "weigh": {"model": splade}}
    options = {"models": models, "max_body_mb": 1, "max_documents": 100}
    config.write_text(yaml.safe_dump(options, sort_keys=False))
    server, client = _started(module_starter, "--config", str(config))
    wait_for(lambda: httpx.get(server.url + "/ready").json()["models"]["ready"] == 3)
    yield server, client
    client.channel.close()


def _code(call: Callable[[], Any]) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code(), failed.value.details()


def _same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, np.array(expected, dtype=np.float32), rtol=1e-5, atol=1e-6)


def test_methods_answer_as_their_routes(served: Served) -> None:
    server, client = served

    def post(route: str, **body: Any) -> httpx.Response:
        answer = httpx.post(server.url + route, json=body)
        assert answer.status_code == 200, (route, body, answer.text)
        return answer

    def check(
        kind: str, request: type, route: str, compare: Callable[[Any, Any], None], **options: Any
    ) -> None:
        """Compares the method's answers to all texts, one by one and in a stream, with the route's."""
        fields = {name: "left" if "direction" in name else value for name, value in options.items()}
        key = "ids" if kind == "Decode" else "inputs"
        inputs = [[2054, 2003], [3000]] if kind == "Decode" else TEXTS
        if kind == "PredictPair":
            inputs = [[TEXTS[0]], TEXTS[:2]]
        requests = [request(**{key: each}, **options) for each in inputs]
        streamed = [*getattr(client, f"{kind}Stream")(iter(requests))]
        assert len(streamed) == len(inputs)
        for each, asked, of_stream in zip(inputs, requests, streamed, strict=True):
            expected = post(route, **{key: each}, **fields)
            answer, call = getattr(client, kind).with_call(asked)
            for found in (answer, of_stream):
                compare(found, expected.json())
                if hasattr(found, "metadata"):
                    headers = expected.headers
                    assert found.metadata.compute_chars == int(headers["x-compute-characters"])
                    assert found.metadata.compute_tokens == int(headers["x-compute-tokens"])
                    assert found.metadata.total_time_ns >= found.metadata.inference_time_ns > 0
            sent = dict(call.initial_metadata())
            assert sent["x-request-id"]
            assert sent.get("x-compute-type") == expected.headers.get("x-compute-type")

    def rows(found: Any) -> list[Any]:
        return [row.embeddings for row in found.token_embeddings]

    embedding = lambda found, expected: _same(found.embeddings, expected[0])  # noqa: E731
    check("Embed", pb.EmbedRequest, "/embed", embedding)
    check("Embed", pb.EmbedRequest, "/embed", embedding, normalize=False, dimensions=384, truncate=True)
    check(
        "EmbedAll", pb.EmbedAllRequest, "/embed_all", lambda found, expected: _same(rows(found), expected[0])
    )

    def weights(found: Any, expected: Any) -> None:
        assert [one.index for one in found.sparse_embeddings] == [one["index"] for one in expected[0]]
        _same([one.value for one in found.sparse_embeddings], [one["value"] for one in expected[0]])

    check("EmbedSparse", pb.EmbedSparseRequest, "/embed_sparse", weights, truncate=True)

    def labels(found: Any, expected: Any) -> None:
        assert [one.label for one in found.predictions] == [one["label"] for one in expected]
        _same([one.score for one in found.predictions], [one["score"] for one in expected])

    check("Predict", pb.PredictRequest, "/predict", labels, truncate=True, truncation_direction=LEFT)
    check("PredictPair", pb.PredictPairRequest, "/predict", labels, raw_scores=True)

    def tokens(found: Any, expected: Any) -> None:
        for one, other in zip(found.tokens, expected[0], strict=True):
            assert (one.id, one.text, one.special) == (other["id"], other["text"], other["special"])
            assert (one.start, one.HasField("start")) == (other["start"] or 0, other["start"] is not None)
            assert one.stop == (other["stop"] or 0)

    check("Tokenize", pb.EncodeRequest, "/tokenize", tokens, add_special_tokens=True)
    check("Tokenize", pb.EncodeRequest, "/tokenize", tokens, add_special_tokens=False)
    text = lambda found, expected: [found.text] == expected or pytest.fail(found.text)  # noqa: E731
    check("Decode", pb.DecodeRequest, "/decode", text, skip_special_tokens=True)

    def ranks(found: Any) -> list[tuple[int, float, str]]:
        return [(one.index, pytest.approx(one.score, rel=1e-5), one.text) for one in found.ranks]

    for options in ({}, {"return_text": True, "raw_scores": True}):
        asked = [pb.RerankStreamRequest(query="file", text=text) for text in TEXTS]
        # The first message decides for all.
        asked[0].MergeFrom(pb.RerankStreamRequest(**options))
        expected = {
            query: [
                (one["index"], one["score"], one.get("text", ""))
                for one in post("/rerank", query=query, texts=TEXTS, **options).json()
            ]
            for query in ("file", "France")
        }
        assert (
            ranks(client.Rerank(pb.RerankRequest(query="file", texts=TEXTS, **options))) == expected["file"]
        )
        assert ranks(client.RerankStream(iter(asked))) == expected["file"]
        asked[2].query = "France"
        of_both = [one for one in expected["file"] if one[0] != 2]
        of_both += [one for one in expected["France"] if one[0] == 2]
        assert ranks(client.RerankStream(iter(asked))) == sorted(of_both, key=lambda one: -one[1])
    described, info = client.Info(pb.InfoRequest()), httpx.get(server.url + "/info").json()
    for name in (
        "version",
        "model_id",
        "model_dtype",
        "max_input_length",
        "max_batch_tokens",
        "max_client_batch_size",
    ):
        assert getattr(described, name) == info[name], name
    assert described.model_type == pb.MODEL_TYPE_RERANKER


def test_wrong_messages_get_a_status_and_what_to_change(served: Served) -> None:
    server, client = served
    wrong, many = CODES.INVALID_ARGUMENT, CODES.RESOURCE_EXHAUSTED
    for call, request, code, message in (
        (client.Embed, pb.EmbedRequest(inputs=LONG), wrong, "tokens"),
        (client.Embed, pb.EmbedRequest(inputs="a", prompt_name="none"), wrong, "no prompt named"),
        (client.Embed, pb.EmbedRequest(inputs="a", truncation_direction=7), wrong, "truncation_direction"),
        (client.Embed, b"\x0a\x05ab", wrong, "no tei.v1.EmbedRequest"),
        (client.Embed, b"\x0a\x02\xff\xff", wrong, "no tei.v1.EmbedRequest"),
        (client.PredictPair, pb.PredictPairRequest(inputs=TEXTS), wrong, "inputs has 3 texts"),
        (client.Rerank, pb.RerankRequest(query="q"), wrong, "texts"),
        (client.Rerank, pb.RerankRequest(query="q", texts=["a"] * 101), wrong, "at most 100"),
        (
            client.Tokenize,
            pb.EncodeRequest(inputs="a", prompt_name="query"),
            wrong,
            "prompt_name is not supported",
        ),
        (client.Decode, pb.DecodeRequest(ids=[10**9]), wrong, "ids must be below"),
        (client.Decode, pb.DecodeRequest(ids=[1] * (1 << 20)), many, "larger than max"),
        (client.Embed, pb.EmbedRequest(inputs="a" * (1 << 21)), many, "larger than max"),
        (client.RerankStream, iter([]), wrong, "send at least one"),
        (
            client.RerankStream,
            (pb.RerankStreamRequest(text="a" * 300_000) for _ in range(5)),
            wrong,
            "too large together",
        ),
        (client.RerankStream, (pb.RerankStreamRequest(text="a") for _ in range(101)), wrong, "at most 100"),
        (client.Check, health_pb2.HealthCheckRequest(service="none"), CODES.NOT_FOUND, "no such service"),
    ):
        found, details = _code(lambda call=call, request=request: call(request))  # type: ignore[misc]
        assert (found, message in details) == (code, True), (request, found, details)
    # A compressed message could become gigabytes.
    zeros = pb.EmbedRequest(inputs="0" * (1 << 20))
    assert _code(lambda: client.Embed(zeros, compression=grpc.Compression.Gzip))[0] == CODES.UNIMPLEMENTED
    good, bad = pb.EmbedRequest(inputs="a"), pb.EmbedRequest(inputs=LONG)
    answers = client.EmbedStream(iter([good, good, bad, good]))
    assert next(answers).embeddings == next(answers).embeddings
    code, details = _code(lambda: next(answers))
    assert (code, "tokens" in details) == (wrong, True)
    truncated = client.EmbedStream(iter([pb.EmbedRequest(inputs=LONG, truncate=True)]))
    assert len(next(truncated).embeddings) == 384
    assert httpx.get(server.url + "/ready").status_code == 200


def test_keys_tenants_and_rates_are_those_of_http(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("one name=search requests_per_minute=3\ntwo name=crawler\n")
    server, client = _started(start_server, "--api-key-file", str(keys))
    key = [("authorization", "Bearer one")]
    request = pb.EmbedRequest(inputs="a")
    for given in ([], [("authorization", "Bearer three")]):
        for call, sent in (
            (client.Embed, request),
            (client.RerankStream, iter([])),
            (client.Info, pb.InfoRequest()),
        ):
            code, details = _code(lambda call=call, sent=sent, given=given: call(sent, metadata=given))  # type: ignore[misc]
            assert (code, details) == (CODES.UNAUTHENTICATED, "send a valid key as Authorization: Bearer KEY")
        for stream, sent in (
            (client.EmbedStream, request),
            (client.ServerReflectionInfo, LIST),
        ):
            call = lambda stream=stream, sent=sent, given=given: [*stream(iter([sent]), metadata=given)]  # type: ignore[misc]  # noqa: E731
            assert _code(call)[0] == CODES.UNAUTHENTICATED
    assert client.Check(health_pb2.HealthCheckRequest()).status == SERVING
    listed = client.ServerReflectionInfo(iter([LIST]), metadata=key)
    names = {service.name for service in next(listed).list_services_response.service}
    assert {f"tei.v1.{name}" for name in pb.DESCRIPTOR.services_by_name} < names
    assert len(names) == 7
    assert len([*client.EmbedStream(iter([request] * 3), metadata=key)]) == 3
    with pytest.raises(grpc.RpcError) as refused:
        client.Embed(request, metadata=key)
    assert refused.value.code() == CODES.RESOURCE_EXHAUSTED
    assert int(dict(refused.value.trailing_metadata())["retry-after"]) > 0
    assert len(client.Embed(request, metadata=[("authorization", "Bearer two")]).embeddings) == 384
    usage = httpx.get(server.url + "/usage", headers=dict(key)).json()["data"]
    assert [(row["tenant"], row["requests"], row["refused"]) for row in usage] == [("search", 3, 1)]


def test_deadlines_and_leaving_end_the_work(start_server: StartServer) -> None:
    options = ("--max-batch-tokens", "512", "--limit", "idle_seconds=1.5")
    server, client = _started(start_server, *options, before=slow_steps)
    texts = [f"{i} " + "word " * 245 for i in range(400)]
    heavy = pb.RerankRequest(query="q", texts=texts, truncate=True)

    def is_at_work() -> bool:
        return server.metric("maxsimd_queue_tokens") > 0

    code, _ = _code(lambda: client.Rerank(heavy, timeout=5))
    assert code in (CODES.DEADLINE_EXCEEDED, CODES.RESOURCE_EXHAUSTED, CODES.INVALID_ARGUMENT)
    wait_for(lambda: not is_at_work())
    left = client.Rerank.future(heavy)
    wait_for(is_at_work)
    left.cancel()
    wait_for(lambda: not is_at_work())

    # A client that sends without reading is not read for long, and then loses its call.
    unread = client.EmbedAllStream(pb.EmbedAllRequest(inputs=LONG, truncate=True) for _ in range(5000))
    wait_for(lambda: "a client has not read its answer" in server.log)
    assert server.metric('maxsimd_http_requests_total{route="/embed_all",status="200"}') < 100
    unread.cancel()
    silent = client.EmbedStream(iter(threading.Event().wait, None))
    assert _code(lambda: next(silent))[0] == CODES.DEADLINE_EXCEEDED


def test_health_follows_readiness_and_calls_are_finished(start_server: StartServer) -> None:
    variables = {"MAXSIMD_DRAIN_SECONDS": "2"}
    server, client = _started(
        start_server, "--max-batch-tokens", "512", before=slow_steps, environment=variables
    )
    watched = client.Watch(health_pb2.HealthCheckRequest(service="tei.v1.Embed"))
    assert next(watched).status == SERVING
    texts = [f"{i} " + "word " * 245 for i in range(40)]
    answer = client.Rerank.future(pb.RerankRequest(query="q", texts=texts, truncate=True))
    idle = client.EmbedStream(iter(threading.Event().wait, None))
    wait_for(lambda: server.metric("maxsimd_queue_tokens") > 0)
    server.process.terminate()
    assert next(watched).status == NOT_SERVING
    assert client.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
    # Work is still accepted.
    assert len(client.Embed(pb.EmbedRequest(inputs="a")).embeddings) == 384
    assert len(answer.result().ranks) == 40
    assert _code(lambda: next(idle))[0] == CODES.UNAVAILABLE
    assert server.process.wait(timeout=600) == 0
    assert _code(lambda: client.Check(health_pb2.HealthCheckRequest()))[0] == CODES.UNAVAILABLE


def test_tls_is_that_of_http(start_server: StartServer, certificate: tuple[str, str]) -> None:  # noqa: F811
    cert, key = certificate
    server = start_server("--tls-cert", cert, "--tls-key", key, "--grpc-port", "0", ready=False)
    wait_for(lambda: "gRPC on" in server.log)
    port = re.findall(r"gRPC on 127\.0\.0\.1:(\d+)", server.log)[0]
    client = Client(f"localhost:{port}", grpc.ssl_channel_credentials(Path(cert).read_bytes()))
    assert len(client.Embed(pb.EmbedRequest(inputs="a")).embeddings) == 384
    another = start_server("--grpc-port", port, ready=False)
    assert another.process.wait(timeout=600) == 1
    assert f"cannot listen on 127.0.0.1, port {port}, for gRPC" in another.log


def test_the_example_of_the_page_prints_what_it_says(start_server: StartServer, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    _, client = _started(start_server)
    script = tmp_path / "shown.py"
    script.write_text(code.replace("127.0.0.1:50051", client.address), encoding="utf-8")
    assert subprocess.check_output([sys.executable, script], text=True, timeout=600) == printed


def test_without_the_extra_the_start_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "maxsimd.api.grpc.server", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(SetupError, match=r"--grpc-port needs the extra grpc: pip install '\.\[grpc\]'"):
        asyncio.run(_open_grpc(Mock(), Mock(), 1))


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path / "set.pb"
    assert (
        protoc.main(["", f"--proto_path={ROOT / 'api/grpc'}", f"--descriptor_set_out={out}", "tei.proto"])
        == 0
    )
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    for field in (field for message in file.message_type for field in message.field):
        field.ClearField("json_name")  # generated code leaves it out
    assert file == FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
