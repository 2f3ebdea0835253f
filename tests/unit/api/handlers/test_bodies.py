"""How bodies are read, the limits on them, and fields that nothing reads: named to the client, or refused."""

import dataclasses
import json
import re
import sys
import tracemalloc
from typing import Any

import msgspec
import pytest

from maxsimd.api.handlers.bodies import LARGE_BODY
from maxsimd.api.handlers.embeddings import EmbeddingsRequest
from maxsimd.api.handlers.handle import route_of
from maxsimd.api.handlers.rerank import SCORE, RerankRequest, ScoreRequest
from maxsimd.api.handlers.route import Group, Shown, post
from maxsimd.api.reading import unread_fields
from tests.unit import calling_handlers
from tests.unit.calling_handlers import GOOD, POSTED, RERANK, Caller, RecordingEngine, error_of, expected

HALF = r" has half of a character, like \ud83d alone; send whole characters, or leave it out"
NOT_UTF8 = "the body is UTF-16 or UTF-32, or no text; send JSON in UTF-8"


@pytest.fixture
def caller(engine: RecordingEngine) -> Caller:
    return Caller(engine, max_body_mb=1, max_documents=10)


WRONG_BODIES = [
    (b"", "the body is not valid JSON: Input data was truncated"),
    (b"[1, 2", "the body is wrong: Expected `object`, got `array`"),
    (b"\xff", "the body is not valid JSON: JSON is malformed: invalid character (byte 0)"),
    *(('{"query": "q"}'.encode(f"utf-{kind}"), NOT_UTF8) for kind in ("16", "16-be", "32", "32-le")),
    (b"\xef\xbb\xbf" * 2, "the body is not valid JSON: JSON is malformed: invalid character (byte 0)"),
    (b"null", "the body is wrong: Expected `object`, got `null`"),
    (b'{"model": "\xff"}', "the body is not valid JSON: a string is not UTF-8 (invalid start byte)"),
]


async def test_malformed_bodies_are_a_400(caller: Caller, engine: RecordingEngine) -> None:
    for path in POSTED:
        for body, message in WRONG_BODIES:
            answer = await caller.post(path, body)
            expected = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            assert (answer.status, error_of(answer)) == (400, expected), (path, body)
    marked = b"\xef\xbb\xbf" + json.dumps(GOOD["POST", "/tokenize"]).encode()
    assert (await caller.post("/tokenize", marked)).status == 200
    for size in (5_000, 50_000):
        deep = b'{"input":' + b"[" * size + b"]" * size + b"}"
        said = "arrays and objects in the body are nested too deeply"
        await Caller(engine).refused("/v1/embeddings", deep, 400, says=said)


async def test_half_of_a_character_is_told_by_its_place(caller: Caller) -> None:
    for path in POSTED:
        for escape in (r"\ud83d", r"\ude00", r"\ud83dx", r"\ud83d\ud83d"):
            for body in (
                json.dumps(GOOD["POST", path]).replace('"q"', f'"{escape}"').replace('"d"', f'"a{escape}"'),
                json.dumps(GOOD["POST", path] | {"unknown": {"d": 1}}).replace('"d"', f'"{escape}"'),
            ):
                sent = body.replace("[101]", f'["{escape}"]').encode()
                status, error = await caller.error(path, sent)
                assert (status, error["type"]) == (400, "BadRequestError"), sent
                assert error["param"] in {*GOOD["POST", path], "unknown"}, sent
                assert error["message"].startswith(error["param"])
                assert error["message"].endswith(HALF)
    report = {"query": "q", "on_error": "report"}
    for path, body, where in (
        ("/rerank", {"query": "q", "documents": ["d"] * 7 + ["\ud83d"]}, "documents[7]"),
        ("/rerank", {"query": "q", "documents": ["d", {"text": "x\ude00"}]}, "documents[1].text"),
        ("/v1/embeddings", {"input": ["\ufdd0", "\ud83d"]}, "input[1]"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["\ud83d"]}}, "inputs.sentences[0]"),
        ("/rerank", report | {"query": "\ud83d", "documents": ["d"]}, "query"),
        ("/rerank", report | {"documents": "\ud83d"}, "documents"),
        ("/rerank", report | {"documents": [{"a": "\ud83d"}], "rank_fields": ["a"]}, "documents[0].a"),
        ("/rerank", report | {"documents": [{"text": "d", "\ud83d": 1}]}, "documents[0]"),
        ("/rerank", report | {"documents": ["d"], "items": ["\ud83d"]}, "items[0]"),
        ("/rerank", report | {"documents": ["d"], "\ud83d": 1}, "the name of a field"),
        ("/rerank", report | {"documents": ["".join(map(chr, range(0xFDD0, 0xFDF0))), "\ud83d"]}, "the body"),
    ):
        status, error = await caller.error(path, body)
        assert (status, error["message"]) == (400, where + HALF)


@pytest.mark.parametrize("path", ["/rerank", "/score", "/invocations"])
async def test_half_a_character_may_be_a_documents_error(caller: Caller, path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("maxsimd.api.handlers.bodies.BLOCK", 9)
    # The second is cut before its half; the last has a backslash and what looks like one.
    documents = ["\U0001f600", "word " * 300 + "\ud83d", {"text": "\ude00"}, "\\ud83d \ufdd0"]
    query, name = ({"queries": "q"}, "items") if path == "/score" else ({"query": "q"}, "documents")
    answer = await caller.json(path, query | {name: documents, "on_error": "report"})
    assert [each["index"] for each in answer["errors"]] == [1, 2]
    assert all(each["error"].endswith(HALF) for each in answer["errors"])
    if path == "/score":
        assert [each["index"] for each in answer["data"]] == [0, 3]
    else:
        shown = {each["index"]: each["document"]["text"] for each in answer["results"]}
        assert shown == {0: documents[0], 3: documents[3]}


async def test_a_body_above_the_limit_is_read_no_further(caller: Caller) -> None:
    most = 1024 * 1024
    for path in POSTED:
        body = json.dumps(GOOD["POST", path]).encode()
        answer = await caller.post(path, body.ljust(most + 1))
        assert (answer.status, error_of(answer)["type"]) == (413, "RequestTooLargeError"), path
    body = json.dumps(RERANK).encode()
    for pieces, status, read in (
        ([body[:5], b"", body[5:6], body[6:].ljust(most - 6)], 200, 4),
        ([b" " * 512 * 1024] * 10, 413, 3),
    ):
        arriving = calling_handlers.Pieces(pieces)
        assert ((await caller.post("/rerank", arriving)).status, arriving.read) == (status, read)


async def test_the_body_is_not_read_for_those_who_are_turned_away(engine: RecordingEngine) -> None:
    guarded, plain, draining = Caller(engine, api_key=("one",)), Caller(engine), Caller(engine)
    draining.state.closing = True
    for caller, method, path, status in (
        (guarded, "POST", "/rerank", 401), (plain, "POST", "/nope", 404), (plain, "POST", "/health", 405),
        (plain, "GET", "/health", 200), (draining, "POST", "/rerank", 503),
    ):  # fmt: skip
        pieces = calling_handlers.Pieces([b"x"])
        assert ((await caller.ask(method, path, pieces)).status, pieces.read) == (status, 0)


async def test_large_bodies_are_parsed_in_the_thread_pool(caller: Caller, engine: RecordingEngine) -> None:
    body = json.dumps({"text": "a"}).encode()
    await caller.post("/tokenize", body.ljust(LARGE_BODY - 100))
    assert engine.in_threads == 1  # which tokenises
    await caller.post("/tokenize", body.ljust(LARGE_BODY + 1))
    assert engine.in_threads == 4  # and which counts what the body has, and decodes it
    await caller.error("/tokenize", {"text": "\ud83d"})
    assert engine.in_threads == 5  # and which finds half of a character in a small body
    await caller.post("/tokenize", {"text": "a", "odd": [1e-320] * 400})
    assert engine.in_threads == 7  # and which reads numbers that take msgspec long


def large(body: Any) -> bytes:
    return json.dumps(body).encode().ljust(LARGE_BODY + 1)


async def test_too_much_in_a_body_is_a_413(caller: Caller, engine: RecordingEngine, monkeypatch: Any) -> None:
    """Ten documents may have 200 arrays and objects and 400 strings, names of fields included."""
    empty = {"query": "q", "documents": ["d"], "unknown": [{}] * 197}
    assert (await caller.post("/rerank", large(empty))).status == 200
    over = "the body has more than 200 arrays and objects"
    await caller.refused("/rerank", large(empty | {"more": {}}), 413, says=over)
    record = {"text": "a", "c": 1} | {f"f{i}": "b" for i in range(197)}
    assert (await caller.post("/rerank", large({"query": "q", "documents": record}))).status == 200
    over = "the body has more than 400 strings, names of fields included; send"
    refused = large({"query": "q", "documents": record | {"c": "d"}})
    assert (await caller.refused("/rerank", refused, 413, says=over))["type"] == "RequestTooLargeError"
    caller = Caller(engine, max_documents=10, accept_token_ids=True)
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, max_request_tokens=1000))
    allowed = 1000 + 10 * 20 + 10 * 40
    over = "the body has more than 1600 values; send fewer token ids"
    await caller.refused("/v1/embeddings", large({"input": [101] * (allowed + 2)}), 413, says=over)
    ids = {"input": [101] * allowed, "truncate_prompt_tokens": -1}
    assert (await caller.post("/v1/embeddings", large(ids))).status == 200


async def test_bodies_beyond_their_memory_are_a_429(engine: RecordingEngine) -> None:
    caller = Caller(engine, max_bodies_mb=1, accept_token_ids=True)
    ids = {"input": [101] * 20_000, "truncate_prompt_tokens": -1}
    with caller.state.held as other:
        other.add(512 * 1024)
        answer = await caller.post("/v1/embeddings", ids)
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert (await caller.post("/tokenize", {"text": "a" * 100_000})).status == 200
    assert ((await caller.post("/v1/embeddings", ids)).status, caller.state.bodies.bytes) == (200, 0)


async def test_more_texts_than_are_allowed_are_a_413(caller: Caller) -> None:
    counted: list[tuple[str, dict[str, Any], str, Any]] = [
        ("/score", {"queries": "q"}, "documents", "d"),
        *(("/rerank", {"query": "q"}, name, "d") for name in ("documents", "texts")),
        *((path, {}, "input", "d") for path in ("/v1/embeddings", "/pooling", "/classify")),
        ("/predict", {}, "inputs", ["d"]),
    ]
    for path, body, param, text in counted:
        assert (await caller.post(path, body | {param: [text] * 10})).status == expected(path)
        await caller.refused(path, body | {param: [text] * 11}, 413, param)
    assert (await caller.post("/score", {"queries": ["q"] * 10, "documents": ["d"] * 10})).status == 200
    await caller.refused("/score", {"queries": ["q"] * 11, "documents": ["d"]}, 413, "queries")


def test_a_route_learns_its_type_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that threads decode for the first time at once crash msgspec."""
    learnt: list[type] = []
    decoder = msgspec.json.Decoder
    monkeypatch.setattr(msgspec.json, "Decoder", lambda kind: learnt.append(kind) or decoder(kind))
    post(("/new",), SCORE, Shown(Group.RANK, "New"))
    assert learnt == [ScoreRequest]


# Shapes of answers that have a place for warnings.
WITH_WARNINGS = {
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/invocations", "/infinity/rerank"),
    *("/infinity/v1/rerank", "/v1/reranking", "/v1/ranking", "/v1/embeddings", "/embeddings", "/pooling"),
    *("/reranking", "/v1/inference/all-MiniLM-L6-v2", "/v1/retrieval/all-MiniLM-L6-v2/reranking"),
    *("/api/embed", "/v1/multi-vector", "/v1/embed", "/v2/embed", "/v1/multimodalembeddings"),
}
SAID = "the field `colour` is not read here"


async def test_unread_fields_are_named(engine: RecordingEngine, lines: pytest.LogCaptureFixture) -> None:
    caller = Caller(engine)
    for path in (*POSTED, POSTED[-1]):
        answer = await caller.post(path, GOOD["POST", path] | {"colour": 1})
        if path not in calling_handlers.REFUSING:
            assert answer.headers["x-maxsimd-warnings"] == SAID, path
        if path in WITH_WARNINGS:
            assert json.loads(answer.body)["warnings"] == [SAID], path
    logged = [record.getMessage() for record in lines.records if record.levelname == "WARNING"]
    assert logged == [f"{route_of(path)[0]}: {SAID}" for path in POSTED], "once each"
    strict = Caller(engine, strict_fields=True)
    for path in POSTED:
        await strict.refused(path, GOOD["POST", path] | {"colour": 1}, 400, "colour", "--strict-fields")


PASSAGES = {"query": "q", "passages": ["d"]}
TEXTS = {"query": "q", "texts": ["d"]}
PARTS = {"content": [{"type": "text", "text": "d", "bold": True}]}
SENTENCES = {"inputs": {"source_sentence": "d", "sentences": ["e"]}}
MUVERA = {"input": "d", "input_type": "query", "encoding": "muvera"}


async def test_a_dropped_field_is_named_with_the_likely_one(caller: Caller) -> None:
    cases: list[tuple[str, Any, str]] = [
        *(
            ("/rerank", RERANK | {name: 1}, f"`{name}` is not read here; did you mean `{meant}`?")
            for name, meant in (
                *(("topn", "top_n"), ("top_N", "top_n"), ("topN", "top_n"), ("normalise", "normalize")),
                *(("returnDocuments", "return_documents"), ("Instruction", "instruction")),
                *(("max_chunks_per_doc", "max_tokens_per_doc"), ("docs", "documents")),
            )
        ),
        ("/v1/embeddings", {"input": "d", "dimension": 3}, "`dimension` .* `dimensions`"),
        ("/v1/embeddings", {"input": "d", "normalize": True}, "`normalize` .* `normalized`"),
        ("/embed", {"inputs": "d", "options": {"wait": True}}, "`options.wait`"),
        # Inside of objects.
        ("/rerank", {"query": {"text": "q", "lang": "en"}, "documents": "d"}, "`query.lang`"),
        ("/rerank", {"query": "q", "documents": ["d", *[{"text": "d", "a": 1}] * 9]}, r"`documents\[\].a`"),
        ("/v1/ranking", {"query": "q", "passages": [{"text": "p", "a": 1}]}, r"`passages\[\].a`"),
        ("/v1/embeddings", {"input": [{"text": "d", "lang": "en"}]}, r"`input\[\].lang`"),
        ("/v1/embeddings", MUVERA | {"muvera": {"ksim": 2}}, "`muvera.ksim` .* `k_sim`"),
        ("/v1/multimodalembeddings", {"inputs": [PARTS]}, r"`inputs\[\].content\[\].bold`"),
        ("/", SENTENCES | {"parameters": {"truncat": True}}, "`parameters.truncat` .* `truncate`"),
        ("/", {"inputs": SENTENCES["inputs"] | {"lang": "en"}}, "`inputs.lang`"),
        ("/invocations", RERANK | {"topn": 1}, "`topn` .* `top_n`"),
        # Known for requests of another shape.
        ("/rerank", RERANK | {"return_text": True}, "`return_text`"),
        ("/rerank", RERANK | {"truncate": False}, "`truncate` .* `truncation`"),
        ("/rerank", RERANK | {"top_k": 1, "top_n": 2}, "`top_n`"),
        ("/rerank", TEXTS | {"max_tokens_per_doc": 5}, "`max_tokens_per_doc`"),
        ("/rerank", TEXTS | {"documents": ["e"]}, "`documents`"),
        ("/score", {"queries": "q", "documents": "d", "text_2": "e"}, "`text_2`"),
        ("/v1/ranking", PASSAGES | {"truncate": "END", "max_tokens_per_doc": 5}, "_per_doc`"),
        ("/v1/reranking", TEXTS | {"return_input": True}, "`return_input`"),
        ("/v1/reranking", {"query": "q", "input": ["d"], "top_n": 1}, "`top_n` .* `top_k`"),
        ("/v1/inference/all-MiniLM-L6-v2", GOOD["POST", "/score"] | {"webhook": "u"}, "`webhook`"),
        ("/v1/inference/all-MiniLM-L6-v2", GOOD["POST", "/score"] | {"model": "other"}, "`model`"),
        ("/api/embed", {"input": "d", "options": {"num_ctx": 8}}, "`options.num_ctx`"),
        ("/api/embed", {"input": "d", "keep_alive": "5m"}, "`keep_alive`"),
        ("/v1/embeddings", {"input": "d", "add_special_tokens": False}, "`add_special_tokens`"),
        ("/v1/embeddings", {"input": "d", "dimensions": 3, "output_dimension": 4}, "`output_dimension`"),
        ("/v1/multi-vector", {"input": "d", "normalized": True}, "`normalized`"),
        ("/", {"inputs": "d", "parameters": {"truncate": True}}, "`parameters`"),
        ("/", SENTENCES | {"truncate": True}, "`truncate`"),
        ("/tokenize", {"inputs": "d", "return_token_strs": True}, "`return_token_strs`"),
    ]
    for path, body, named in cases:
        answer = await caller.post(path, body)
        assert answer.status == 200, answer.body
        said = answer.headers.get("x-maxsimd-warnings", "")
        assert said.count("is not read here") == 1, (path, body)
        assert re.search(named, said), said


def test_dropped_fields_are_found_and_not_copied() -> None:
    for extra, found in (({"name": "n"}, "messages[].name"), (PARTS, "messages[].content[].bold")):
        body = {"messages": [{"role": "user", "content": "d"} | extra]}
        request = msgspec.convert(body, type=EmbeddingsRequest)
        for given in (body, msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])):
            assert [field.path for field in unread_fields(request, given)] == [found]
    given = msgspec.json.decode(b'{"long": [%s]}' % (b"1" * 1_000_000), type=dict[str, msgspec.Raw])
    request = RerankRequest(query="q")
    tracemalloc.start()
    found = [unread_fields(request, {name: given["long"]}) for name in ("topn", "return_text")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000
    assert [field.path for fields in found for field in fields] == ["topn", "return_text"]


async def test_usual_clients_get_no_warning(engine: RecordingEngine) -> None:
    caller = Caller(engine, strict_fields=True)
    records = {"query": "q", "documents": [{"title": "t", "text": "d", "n": 1}], "rank_fields": ["title"]}
    jina = {"input": ["d"], "task": "text-matching", "late_chunking": False, "embedding_type": "float"}
    for path, body in (
        ("/v1/embeddings", {"input": ["d"], "user": "me", "encoding_format": "base64", "dimensions": 0}),
        ("/v1/embeddings", jina | {"normalized": True}),
        ("/v1/embeddings", {"input": ["d"], "truncation": True, "input_type": None, "output_dtype": "float"}),
        ("/v1/rerank", RERANK | {"max_chunks_per_doc": None, "rank_fields": None, "return_documents": True}),
        ("/v2/rerank", RERANK | {"max_tokens_per_doc": 4096, "priority": 0, "top_n": 1}),
        ("/v1/rerank", RERANK | {"instruct": None, "user": "u", "request_id": "r"}),
        ("/v1/rerank", records),
        ("/rerank", {"query": "q", "documents": [{"id": "7", "text": "d"}]}),
        ("/rerank", TEXTS | {"raw_scores": False, "return_documents": True, "truncation_direction": "Right"}),
        ("/rerank", RERANK | {"top_k": 1, "truncation": True, "return_documents": False}),
        ("/score", {"text_1": "q", "text_2": ["d"], "user": "u", "truncate_prompt_tokens": 9}),
        ("/v2/embed", {"texts": ["d"], "input_type": "search_query", "embedding_types": ["float"]}),
        ("/embed", {"inputs": ["d"], "options": {"wait_for_model": True, "use_cache": True}}),
        ("/", {"inputs": ["d"], "normalize": True, "truncate": True, "truncation_direction": "Right"}),
        ("/", {"inputs": ["d"], "parameters": {}}),
        ("/v1/reranking", {"query": "q", "input": ["d"], "return_input": True, "rank_fields": None}),
        ("/infinity/rerank", RERANK | {"raw_scores": False, "return_documents": False}),
        ("/api/embed", {"input": ["d"], "truncate": True, "options": {"num_ctx": None}, "keep_alive": None}),
    ):
        answer = await caller.post(path, body)
        assert (answer.status, answer.headers.get("x-maxsimd-warnings")) == (200, None), answer.body


async def test_made_up_names_fill_no_header_or_log(caller: Caller, lines: pytest.LogCaptureFixture) -> None:
    for i in range(24):
        names = {f"\U0001f600\r\n{i}.{j}{'x' * 900}": 1 for j in range(20)}
        said = (await caller.post("/rerank", RERANK | names)).headers["x-maxsimd-warnings"]
        assert (said.isascii(), said.isprintable(), len(said) < 2_000) == (True, True, True), said
        assert said.endswith("; more fields are not read here")
    logged = [record.getMessage() for record in lines.records if record.levelname == "WARNING"]
    assert (len(logged), logged[-1]) == (201, "more unread fields of requests are not logged")
    assert max(map(len, logged)) < 200


async def test_answers_have_the_warnings_of_their_header(caller: Caller) -> None:
    answer = await caller.post("/rerank", RERANK | {"stream": True, "topn": 1})
    last = json.loads(answer.body.splitlines()[-1])
    assert last["warnings"] == [answer.headers["x-maxsimd-warnings"]]
    assert "`topn`" in last["warnings"][0]
    answer = await caller.post("/v1/embeddings", {"input": "d", "normalized": False})
    assert "normalized false has no effect" in answer.headers["x-maxsimd-warnings"]
    assert msgspec.json.decode(answer.body)["warnings"] == [answer.headers["x-maxsimd-warnings"]]


def small(before: str, value: str, behind: str) -> bytes:
    """A body that repeats a value as often as a small body has room, and a request may."""
    count = min(9_900, (LARGE_BODY - 100 - len(before) - len(behind)) // (len(value) + 1))
    return (before + ",".join([value] * count) + behind).encode()


TO_RANK = '{"query": "a", "documents": ['
SLOW_BODIES = [
    ("/rerank", small(TO_RANK, '"a"', "]}"), 200),
    ("/rerank", small(TO_RANK, '"a"', '], "stream": true}'), 200),
    ("/rerank", small('{"query": "a", "texts": [', '"a"', "]}"), 200),
    ("/rerank", small(TO_RANK, '{"text": "a", "odd": 1}', "]}"), 200),
    ("/rerank", small(TO_RANK, '{"content": [{"type": "text", "text": "a"}]}', "]}"), 200),
    ("/rerank", small(TO_RANK + '{"content": [', "{}", "]}]}"), 400),
    ("/rerank", small(TO_RANK, '{"embedding": [1]}', "]}"), 400),
    ("/rerank", small(TO_RANK, '{"image": "a"}', "]}"), 400),
    ("/rerank", small(TO_RANK + '{"a": [', "1", ']}], "rank_fields": ["a"]}'), 200),
    ("/rerank", small(TO_RANK + '"a"], "cascade": [', '{"model": "a"}', "]}"), 400),
    ("/v1/embeddings", small('{"messages": [', '{"role": "a", "content": []}', "]}"), 400),
    ("/decode", b'{"ids": [1%b]}' % (b", 1" * 100_000), 200),
]


@pytest.mark.parametrize(("path", "body", "status"), SLOW_BODIES)
async def test_no_body_takes_the_event_loop_long(engine: Any, path: str, body: bytes, status: int) -> None:
    caller, calls = Caller(engine), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)  # of this thread alone, and the same however busy the machine is
    try:
        answer = await caller.post(path, body)
    finally:
        sys.setprofile(None)
    assert (answer.status, calls < 60_000) == (status, True), calls
