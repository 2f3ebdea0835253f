"""Fields that nothing reads: every route names them to the client and the log, or refuses them."""

import json
import re
import tracemalloc
from typing import Any

import msgspec
import pytest

from maxsimd.api.handlers.handle import route_of
from maxsimd.api.request_warnings import unread_fields
from maxsimd.api.wire import EmbeddingsRequest, RerankRequest
from tests.unit.calling_handlers import GOOD, POSTED, REFUSING, Caller, RecordingEngine

# Shapes of answers that have a place for warnings.
WITH_WARNINGS = {
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/invocations", "/infinity/rerank"),
    *("/infinity/v1/rerank", "/v1/reranking", "/v1/ranking", "/v1/embeddings", "/embeddings", "/pooling"),
    *("/reranking", "/v1/inference/all-MiniLM-L6-v2", "/v1/retrieval/all-MiniLM-L6-v2/reranking"),
    *("/api/embed", "/v1/multi-vector", "/v1/embed", "/v2/embed", "/v1/multimodalembeddings"),
}
SAID = "the field `colour` is not read here"


async def test_a_field_that_a_route_lacks_is_named_or_refused(
    engine: RecordingEngine, lines: pytest.LogCaptureFixture
) -> None:
    caller = Caller(engine)
    for path in (*POSTED, POSTED[-1]):
        answer = await caller.post(path, GOOD["POST", path] | {"colour": 1})
        if path not in REFUSING:
            assert answer.headers["x-maxsimd-warnings"] == SAID, path
        if path in WITH_WARNINGS:
            assert json.loads(answer.body)["warnings"] == [SAID], path
    logged = [record.getMessage() for record in lines.records if record.levelname == "WARNING"]
    assert logged == [f"{route_of(path)}: {SAID}" for path in POSTED], "once each"
    strict = Caller(engine, strict_fields=True)
    for path in POSTED:
        status, error = await strict.error(path, GOOD["POST", path] | {"colour": 1})
        assert (status, error["param"]) == (400, "colour"), path
        assert "--strict-fields" in error["message"]


RERANK = {"query": "q", "documents": ["d"]}
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
        ("/v2/embed", {"texts": ["d"], "input_typ": "x"}, "`input_typ` .* `input_type`"),
        ("/embed", {"inputs": "d", "normalise": True}, "`normalise` .* `normalize`"),
        ("/embed", {"inputs": "d", "options": {"wait": True}}, "`options.wait`"),
        ("/tokenize", {"text": "d", "return_tokens": True}, "`return_tokens` .* `return_token_strs`"),
        # Inside of objects.
        ("/rerank", {"query": {"text": "q", "lang": "en"}, "documents": "d"}, "`query.lang`"),
        (
            "/rerank",
            {"query": "q", "documents": ["d", *[{"text": "d", "title": "t"}] * 9]},
            r"`documents\[\].title`",
        ),
        ("/rerank", {"query": "q", "documents": [{"text": "d", "content": "e"}]}, r"`documents\[\].content`"),
        ("/score", {"queries": "q", "items": {"content": "d", "titel": "t"}}, "`items.titel`"),
        ("/v1/ranking", {"query": "q", "passages": [{"text": "p", "a": 1}]}, r"`passages\[\].a`"),
        ("/v1/embeddings", {"input": [{"text": "d", "lang": "en"}]}, r"`input\[\].lang`"),
        ("/v1/embeddings", MUVERA | {"muvera": {"ksim": 2}}, "`muvera.ksim` .* `k_sim`"),
        ("/v1/multimodalembeddings", {"inputs": [PARTS]}, r"`inputs\[\].content\[\].bold`"),
        ("/", SENTENCES | {"parameters": {"truncat": True}}, "`parameters.truncat` .* `truncate`"),
        ("/", {"inputs": SENTENCES["inputs"] | {"lang": "en"}}, "`inputs.lang`"),
        ("/similarity", {"inputs": SENTENCES["inputs"] | {"lang": "en"}}, "`inputs.lang`"),
        ("/invocations", RERANK | {"topn": 1}, "`topn` .* `top_n`"),
        ("/invocations", {"inputs": "d", "normalise": True}, "`normalise` .* `normalize`"),
        # Known for requests of another shape.
        ("/rerank", RERANK | {"return_text": True}, "`return_text`"),
        ("/rerank", RERANK | {"truncate": False}, "`truncate` .* `truncation`"),
        ("/rerank", RERANK | {"top_k": 1, "top_n": 2}, "`top_n`"),
        ("/rerank", TEXTS | {"max_tokens_per_doc": 5}, "`max_tokens_per_doc`"),
        ("/rerank", TEXTS | {"documents": ["e"]}, "`documents`"),
        ("/score", {"queries": "q", "documents": "d", "text_2": "e"}, "`text_2`"),
        (
            "/v1/ranking",
            GOOD["POST", "/v1/ranking"] | {"truncate": "END", "max_tokens_per_doc": 5},
            "_per_doc`",
        ),
        ("/v1/reranking", RERANK | {"top_k": 1}, "`top_k` .* `top_n`"),
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
    for path, body, expected in cases:
        answer = await caller.post(path, body)
        assert answer.status == 200, answer.body
        said = answer.headers.get("x-maxsimd-warnings", "")
        assert said.count("is not read here") == 1, (path, body)
        assert re.search(expected, said), said


def test_a_dropped_field_of_a_message_is_found() -> None:
    for extra, found in (({"name": "n"}, "messages[].name"), (PARTS, "messages[].content[].bold")):
        body = {"messages": [{"role": "user", "content": "d"} | extra]}
        request = msgspec.convert(body, type=EmbeddingsRequest)
        for given in (body, msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])):
            assert [field.path for field in unread_fields(request, given)] == [found]


def test_a_large_value_that_is_not_read_is_not_copied() -> None:
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


async def test_made_up_names_fill_neither_header_nor_log(
    caller: Caller, lines: pytest.LogCaptureFixture
) -> None:
    for i in range(24):
        names = {f"\U0001f600\r\n{i}.{j}{'x' * 900}": 1 for j in range(20)}
        answer = await caller.post("/rerank", RERANK | names)
        said = answer.headers["x-maxsimd-warnings"]
        assert said.isascii()
        assert said.isprintable()
        assert len(said) < 2_000
        assert said.endswith("; more fields are not read here")
    logged = [record.getMessage() for record in lines.records if record.levelname == "WARNING"]
    assert len(logged) == 201
    assert max(map(len, logged)) < 200
    assert logged[-1] == "more unread fields of requests are not logged"


async def test_a_stream_and_an_error_line_have_the_warning(caller: Caller) -> None:
    answer = await caller.post("/rerank", RERANK | {"stream": True, "topn": 1})
    last = json.loads(answer.body.splitlines()[-1])
    assert last["warnings"] == [answer.headers["x-maxsimd-warnings"]]
    assert "`topn`" in last["warnings"][0]


async def test_instruct_is_another_name_for_the_instruction(caller: Caller) -> None:
    status, error = await caller.error("/rerank", RERANK | {"instruct": "a", "instruction": "b"})
    assert (status, error["param"]) == (400, "instruct")


async def test_vectors_have_length_one_on_request(caller: Caller) -> None:
    """This model's own last layer normalises, which the answer says where it is not wanted."""
    answer = await caller.post("/v1/embeddings", {"input": "d", "normalized": False})
    assert "normalized false has no effect" in answer.headers["x-maxsimd-warnings"]
    assert msgspec.json.decode(answer.body)["warnings"] == [answer.headers["x-maxsimd-warnings"]]
