"""Every field of every request on its way from the wire to the engine, route by route."""

from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from maxsimd.api import handlers, wire
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, InvalidRequestError, Truncation
from tests.unit.calling_handlers import GOOD, POSTED, Caller, RecordingEngine

REFUSE = Truncation()
CLASSIFY = {"truncation": CUT_LONG, "use_activation": True, "priority": 0, "tenant": "", "timeout": None}
PAIRS = CLASSIFY | {"normalize": False, "instruction": None, "cache": "use"}
PAIRS |= {"on_timeout": "error", "on_error": "fail", "explain": False}
RANK = PAIRS | {"top_n": None, "score_threshold": None}
RAW_RANK = RANK | {"use_activation": False}
EMBED = {"truncation": CUT_LONG, "priority": 0, "tenant": "", "timeout": None}
EMBED |= {"input_type": None, "prompt_name": None, "dimensions": None}
ADD = {"truncation": CUT_LONG, "priority": 0, "tenant": "", "timeout": None}
SCORE_LABELS = {
    "apply_softmax": False,
    "document_first": False,
    "tokenize_apart": False,
    "add_special_tokens": True,
    "priority": 0,
    "tenant": "",
    "timeout": None,
}
VENDOR_EMBED = {"input_type": None, "prompt_name": None, "truncation": CUT_LONG, "tenant": ""}
COHERE_EMBED = OLLAMA_EMBED = VENDOR_EMBED | {"dimensions": None}
TEI_EMBED = VENDOR_EMBED | {"timeout": None}
LABEL = {"aggregation_strategy": "none", "ignore_labels": ["O"], "stride": None}
PREDICT_TOKENS = LABEL | {"ignore_labels": (), "return_logits": True, "truncation": CUT_LONG, "tenant": ""}
SIMPLE = {"aggregation_strategy": "simple", "ignore_labels": ["O"], "return_logits": False}
PREDICT = {"text_pairs": None, "truncation": CUT_LONG, "use_activation": True, "tenant": "", "timeout": None}

SCORE_BODY = {"queries": "q", "documents": ["d", "e"]}
RERANK_BODY = {"query": "q", "documents": ["d", "e"]}
MIXEDBREAD_BODY = {"query": "q", "input": ["d", "e"]}
NVIDIA_BODY = {"query": {"text": "q"}, "passages": [{"text": "d"}, {"text": "e"}]}
SIMILARITY_BODY = {"inputs": {"source_sentence": "d", "sentences": ["e", "f"]}}
TOKENS_BODY = {"input": "d", "task": "token_embed"}
LABEL_BODY = {"input": "d", "task": "token_classify"}
VOYAGE_BODY = {"inputs": [{"content": [{"type": "text", "text": "d"}]}]}
LABELS_BODY = {"query": "q", "items": ["d"], "label_token_ids": [1]}
TEXTS_BODY = {"query": "q", "texts": ["d", "e"]}
DEEPINFRA = "/v1/inference/all-MiniLM-L6-v2"

# The engine's method, texts and options that each route calls with the plainest request.
PLAIN: dict[str, tuple[str, dict[str, Any], str, tuple[Any, ...], dict[str, Any]]] = {
    "score": ("/score", SCORE_BODY, "score", (["q"], ["d", "e"]), PAIRS),
    "rerank": ("/rerank", RERANK_BODY, "rerank", ("q", ["d", "e"]), RANK),
    "rerank texts": ("/rerank", TEXTS_BODY, "rerank", ("q", ["d", "e"]), RANK),
    "reranking": ("/v1/reranking", MIXEDBREAD_BODY, "rerank", ("q", ["d", "e"]), RANK),
    "reranking documents": ("/v1/reranking", RERANK_BODY, "rerank", ("q", ["d", "e"]), RANK),
    "reranking texts": ("/v1/reranking", TEXTS_BODY, "rerank", ("q", ["d", "e"]), RANK),
    "ranking": ("/v1/ranking", NVIDIA_BODY, "rerank", ("q", ["d", "e"]), RAW_RANK),
    "deepinfra": (DEEPINFRA, SCORE_BODY, "score", (["q"], ["d", "e"]), PAIRS),
    "infinity": ("/infinity/rerank", RERANK_BODY, "rerank", ("q", ["d", "e"]), RANK),
    "documents": ("/documents", {"documents": ["d"]}, "add_documents", (["d"],), ADD),
    "embeddings": ("/v1/embeddings", {"input": "d"}, "embed", (["d"],), EMBED),
    "multi-vector": ("/v1/multi-vector", {"input": "d"}, "embed_tokens", (["d"],), EMBED),
    "pooling": ("/pooling", {"input": "d"}, "embed_tokens", (["d"],), EMBED),
    "pooling embed": ("/pooling", {"input": "d", "task": "embed"}, "embed", (["d"],), EMBED),
    "pooling tokens": ("/pooling", TOKENS_BODY, "embed_tokens", (["d"],), EMBED),
    "pooling classify": ("/pooling", {"input": "d", "task": "classify"}, "classify", (["d"],), CLASSIFY),
    "pooling label": ("/pooling", LABEL_BODY, "token_classify", (["d"],), ADD | {"return_logits": True}),
    "classify": ("/classify", {"input": "d"}, "classify", (["d"],), CLASSIFY),
    "label": ("/v1/token-classify", {"input": "d"}, "token_classify", (["d"],), ADD | LABEL),
    "predict_tokens": ("/predict_tokens", {"inputs": "d"}, "token_classify", (["d"],), PREDICT_TOKENS),
    "predict": ("/predict", {"inputs": "d"}, "classify", (["d"],), PREDICT),
    "label-scores": ("/v1/label-scores", LABELS_BODY, "label_scores", ("q", ["d"], [1]), SCORE_LABELS),
    "generative_scoring": (
        "/generative_scoring",
        LABELS_BODY,
        "label_scores",
        ("q", ["d"], [1]),
        SCORE_LABELS | {"apply_softmax": True, "tokenize_apart": True, "add_special_tokens": True},
    ),
    "ollama": ("/api/embed", {"input": "d"}, "embed", (["d"],), OLLAMA_EMBED),
    "v1/embed": ("/v1/embed", {"texts": ["d"]}, "embed", (["d"],), COHERE_EMBED),
    "multimodal": ("/v1/multimodalembeddings", VOYAGE_BODY, "embed", (["d"],), COHERE_EMBED),
    "v2/embed": ("/v2/embed", {"texts": ["d"]}, "embed", (["d"],), COHERE_EMBED),
    "embed": ("/embed", {"inputs": "d"}, "embed", (["d"],), TEI_EMBED | {"dimensions": None}),
    "embed_all": ("/embed_all", {"inputs": "d"}, "embed_tokens", (["d"],), TEI_EMBED),
    "similarity": ("/similarity", SIMILARITY_BODY, "embed", (["d", "e", "f"],), TEI_EMBED),
    "root": ("/", {"inputs": "d"}, "embed", (["d"],), TEI_EMBED | {"dimensions": None}),
    "root similarity": ("/", SIMILARITY_BODY, "embed", (["d", "e", "f"],), TEI_EMBED),
}
RERANKS = ("rerank", "reranking", "reranking documents", "ranking", "infinity")
TEXTS_RERANKS = ("rerank texts", "reranking texts")
OPENAI_EMBEDS = ("embeddings", "multi-vector")
EMBEDS = (*OPENAI_EMBEDS, "pooling", "pooling embed", "pooling tokens")
COHERE_EMBEDS = ("v1/embed", "v2/embed")
TEI_VECTORS = ("embed", "embed_all", "root")
SIMILARITIES = ("similarity", "root similarity")
OF_VECTORS = (*EMBEDS, *COHERE_EMBEDS, "multimodal", "ollama", *TEI_VECTORS, *SIMILARITIES)
TEI = (*TEXTS_RERANKS, "predict", "predict_tokens", *TEI_VECTORS)
CLASSIFIES = ("pooling classify", "classify")
PAIRED = ("score", "deepinfra", *RERANKS)
SCORING = (*PAIRED, *TEXTS_RERANKS)
LABELING = ("label-scores", "generative_scoring")
LABELS = ("pooling label", "label")
QUEUED = (*SCORING, "documents", *EMBEDS, *CLASSIFIES, *LABELS, *LABELING)
TRUNCATING = (*PAIRED, "documents", *EMBEDS, *CLASSIFIES, *LABELS)
VOYAGES = ("rerank", "reranking", "reranking documents", "multimodal")
TOP_N = ("rerank", "reranking documents", "infinity", *TEXTS_RERANKS)
STRICT = {"long_documents": "error"}
LEFT = Truncation(side="left")
CUT_LEFT = Truncation(max_tokens=-1, side="left")


def _call(caller: Caller) -> tuple[str, Any, dict[str, Any]]:
    """The engine's first call, without options that no field sets: `max_tokens` and `return_tokens`."""
    method, texts, options = caller.engine.calls[0]
    own = {"max_tokens", "return_tokens"}
    return method, texts, {name: value for name, value in options.items() if name not in own}


def _truncation(**changes: Any) -> dict[str, Any]:
    return {"truncation": Truncation(**changes)}


def _cut(**changes: Any) -> dict[str, Any]:
    return {"truncation": Truncation(**{"max_tokens": -1} | changes)}


# Routes, fields added to the plainest request, and the changes of the call.
Change = tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]
CHANGES: list[Change] = [
    (TRUNCATING, {"truncate_prompt_tokens": 7}, _truncation(max_tokens=7)),
    (TRUNCATING, {"truncation_side": "left"}, _cut(side="left")),
    *((TRUNCATING, STRICT, {"truncation": REFUSE}), (QUEUED, {"priority": 3}, {"priority": 3})),
    *((QUEUED, {"priority": "batch"}, {"priority": "batch"}), (QUEUED, {"timeout": 17.5}, {"timeout": 17.5})),
    (PAIRED, {"max_tokens_per_query": 5, "window_overlap": 4}, _cut(max_query_tokens=5, window_overlap=4)),
    ((*PAIRED, "documents"), {"max_tokens_per_doc": 6}, _cut(max_document_tokens=6)),
    (("documents",), {"window_overlap": 4}, _cut(window_overlap=4)),
    (PAIRED, {"max_tokens_per_query": 0, "max_tokens_per_doc": 0}, {}),
    (PAIRED, STRICT | {"max_tokens_per_doc": 6}, _truncation(max_document_tokens=6, refuse=True)),
    (TRUNCATING, STRICT | {"truncate_prompt_tokens": 7}, _truncation(max_tokens=7, refuse=True)),
    ((*SCORING, *CLASSIFIES), {"use_activation": False}, {"use_activation": False}),
    ((*SCORING, "predict", "classify"), {"raw_scores": True}, {"use_activation": False}),
    (SCORING, {"raw_scores": True, "use_activation": True}, {"use_activation": True}),
    (SCORING, {"normalize": True}, {"normalize": True, "use_activation": True}),
    (SCORING, dict.fromkeys(("normalize", "explain", "stream"), False), {}),
    (SCORING, {"cache": "use", "on_timeout": "error", "on_error": "fail"}, {}),
    ((*RERANKS, *TEXTS_RERANKS), {"score_threshold": 0.25}, {"score_threshold": 0.25}),
    *((SCORING, {name: "find"}, {"instruction": "find"}) for name in ("instruction", "instruct")),
    ((*PAIRED, "documents"), {"long_documents": "window"}, {"truncation": WINDOW_LONG}),
    (SCORING, {"cache": "bypass"}, {"cache": "bypass"}),
    (SCORING, {"cache": "refresh"}, {"cache": "refresh"}),
    (("score", "rerank"), {"on_timeout": "partial"}, {"on_timeout": "partial"}),
    (("score", "rerank"), {"on_error": "report"}, {"on_error": "report"}),
    *((("score", "rerank"), {"explain": True}, {"explain": True}), (TOP_N, {"top_n": 1}, {"top_n": 1})),
    *((TOP_N, {"top_n": 0}, {"top_n": 0}), (("rerank", "rerank texts"), {"top_n": "1"}, {"top_n": 1})),
    (("rerank", "rerank texts"), {"top_n": 1.0}, {"top_n": 1}),
    (("rerank", "reranking", "ranking"), {"top_k": 1}, {"top_n": 1}),
    ((*VOYAGES, *EMBEDS), {"truncation": True}, {}),
    ((*VOYAGES, *EMBEDS), {"truncation": False}, {"truncation": REFUSE}),
    (("ranking", *COHERE_EMBEDS), {"truncate": "NONE"}, {"truncation": REFUSE}),
    (("ranking",), {"truncate": "END"}, {}),
    ((*TEI, "ollama"), {"truncate": False}, {"truncation": REFUSE}),
    ((*TEI, "ollama"), {"truncate": True}, {}),
    (TEI, {"truncation_direction": "Left"}, {"truncation": CUT_LEFT}),
    (TEI, {"truncate": False, "truncation_direction": "Left"}, {"truncation": LEFT}),
    ((*EMBEDS, "ollama", "embed", "root"), {"dimensions": 3}, {"dimensions": 3}),
    ((*EMBEDS, "ollama"), {"dimensions": 0}, {}),
    ((*EMBEDS, *COHERE_EMBEDS, "multimodal"), {"output_dimension": 3}, {"dimensions": 3}),
    (OPENAI_EMBEDS, {"task": "retrieval.query"}, {"input_type": "query"}),
    (OPENAI_EMBEDS, {"task": "text-matching"}, {}),
    ((*EMBEDS, *TEI_VECTORS), {"prompt_name": "clustering"}, {"prompt_name": "clustering"}),
    ((*EMBEDS, *COHERE_EMBEDS, "multimodal"), {"input_type": "search_query"}, {"input_type": "query"}),
    ((*EMBEDS, "multimodal"), {"input_type": "passage"}, {"input_type": "document"}),
    (EMBEDS, {"model": "all-MiniLM-L6-v2:query", "input_type": "search"}, {"input_type": "query"}),
    (OF_VECTORS, {"model": "all-MiniLM-L6-v2:document"}, {"input_type": "document"}),
    (OF_VECTORS, {"model": "all-MiniLM-L6-v2@clustering"}, {"prompt_name": "clustering"}),
    (CLASSIFIES, {"use_activation": True}, {}),
    *((LABELING, {"apply_softmax": given}, {"apply_softmax": given}) for given in (True, False)),
    (("generative_scoring",), {"add_special_tokens": False}, {"add_special_tokens": False}),
    *((LABELING, {"item_first": True}, {"document_first": True}), (LABELING, {"item_first": False}, {})),
    (COHERE_EMBEDS, {"truncate": "START"}, {"truncation": CUT_LEFT}),
    (COHERE_EMBEDS, {"truncate": "END"}, _cut(side="right")),
    (COHERE_EMBEDS, {"input_type": "search_document"}, {"input_type": "document"}),
    *((COHERE_EMBEDS, {"input_type": "clustering"}, {}), (("embed", "root"), {"normalize": False}, {})),
    (SIMILARITIES, {"parameters": {"truncate": False}}, {"truncation": REFUSE}),
    (SIMILARITIES, {"parameters": {"truncation_direction": "Left"}}, {"truncation": CUT_LEFT}),
    (SIMILARITIES, {"parameters": {"prompt_name": "clustering"}}, {"prompt_name": "clustering"}),
    (("label",), {"aggregation_strategy": "max"}, {"aggregation_strategy": "max"}),
    *((("label",), field, field) for field in ({"ignore_labels": ["B-X"]}, {"stride": 4})),
    *(
        (("predict_tokens",), body, SIMPLE)
        for body in ({"aggregation_strategy": "simple"}, {"parameters": {}})
    ),
    (("predict_tokens",), {"parameters": {"stride": 4}}, SIMPLE | {"stride": 4}),
    (("predict_tokens",), {"raw_scores": True}, {}),
    *((("predict", "classify"), {"raw_scores": False}, {}), (("predict",), {"parameters": {"top_k": 1}}, {})),
    *(
        (("predict",), {"parameters": {"function_to_apply": name}}, {"use_activation": False})
        for name in ("sigmoid", "softmax", "none")
    ),
]
KINDS: dict[str, type[msgspec.Struct]] = {
    "/score": handlers.rerank.ScoreRequest, "/rerank": handlers.rerank.RerankRequest,
    "/documents": handlers.documents.AddRequest,
    "/v1/reranking": handlers.vendor_reranks.RerankingRequest,
    "/v1/ranking": handlers.vendor_reranks.NvidiaRequest, DEEPINFRA: handlers.vendor_reranks.DeepInfraRequest,
    "/api/embed": handlers.vendor_embeddings.OllamaEmbedRequest,
    "/infinity/rerank": handlers.vendor_reranks.InfinityRequest,
    **dict.fromkeys(("/v1/multi-vector", "/v1/embeddings"), handlers.embeddings.EmbeddingsRequest),
    "/pooling": handlers.embeddings.PoolingRequest, "/classify": handlers.classification.ClassifyRequest,
    "/predict": handlers.classification.PredictRequest,
    "/v1/label-scores": handlers.labels.LabelScoresRequest,
    "/generative_scoring": handlers.labels.GenerativeScoringRequest,
    "/v1/token-classify": handlers.token_classification.TokenClassifyRequest,
    "/predict_tokens": handlers.token_classification.PredictTokensRequest,
    **dict.fromkeys(("/v1/embed", "/v2/embed"), handlers.vendor_embeddings.CohereEmbedRequest),
    "/v1/multimodalembeddings": handlers.vendor_embeddings.MultimodalRequest,
    "/embed": handlers.tei.TeiEmbedRequest, "/embed_all": handlers.tei.TeiEmbedAllRequest,
    "/similarity": handlers.tei.TeiSimilarityRequest, "/": handlers.tei.TeiVectorsRequest,
    "/decode": handlers.tei.TeiDecodeRequest, "/tokenize": handlers.tokens.TokenizeRequest,
    "/detokenize": handlers.tokens.DetokenizeRequest,
}  # fmt: skip
# The same under another path.
ALIASES = (
    *("/v1/score", "/v1/rerank", "/v2/rerank", "/infinity/v1/rerank", "/embeddings", "/reranking"),
    "/v1/retrieval/all-MiniLM-L6-v2/reranking",
    *("/v1/documents", "/label-scores", "/token-classify"),
)
# Fields that change what is answered and not what the engine is asked: see the tests of answers.
ANSWERED = {
    *("model", "return_documents", "return_text", "encoding_format", "return_token_strs", "tokens"),
    *("output_encoding", "modality"),
    *("ids", "skip_special_tokens", "embedding_types", "embed_dtype", "output_dtype", "embedding_type"),
    *("return_input", "add_special_tokens", "score_threshold"),
    *("user", "request_id", "options", "normalized"),
    "cascade",  # see the tests of several models
    # Fields of a chat.
    *("messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
}
# Fields of one vector a text: tested in test_answers.
ONE_VECTOR = {"late_chunking", "chunks", "encoding", "muvera"}
# Fields that hold the texts: tested below.
TEXTS = {
    *("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2", "texts"),
    *("labels", "label_token_ids"),
    *("rank_fields", "input", "inputs", "images", "task", "text", "prompt", "passages"),
}


@pytest.fixture
def caller(engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Its engine notes how it is called, which is all that is looked at here, and runs nothing."""
    methods = ("score", "rerank", "embed", "embed_tokens", "classify", "token_classify", "add_documents")
    for method in (*methods, "label_scores"):
        monkeypatch.setattr(Engine, method, AsyncMock(side_effect=InvalidRequestError("not run")))
    return Caller(engine)


async def test_every_field_of_every_request_is_tested() -> None:
    assert sorted([*KINDS, *ALIASES, "/invocations", "/embed_sparse"]) == POSTED
    for path, kind in KINDS.items():
        added = [body for names, body, _ in CHANGES for name in names if PLAIN[name][0] == path]
        tested = {field for body in added for field in body}
        fields = {field.name for field in msgspec.structs.fields(kind)}
        assert fields - tested <= ANSWERED | TEXTS | ONE_VECTOR, path


@pytest.mark.parametrize("name", PLAIN)
async def test_every_field_of_a_request_reaches_the_engine(caller: Caller, name: str) -> None:
    path, body, method, texts, options = PLAIN[name]
    nulls = {field.name: None for field in msgspec.structs.fields(KINDS[path])}
    unknown = {"user": "me", "cache_salt": {"a": [1]}}
    asked = [(body, {}), (nulls | {"user": None} | body, {}), (unknown | body, {})]
    asked += [(body | added, change) for names, added, change in CHANGES if name in names]
    for request, change in asked:
        caller.engine.calls.clear()
        await caller.post(path, request)
        assert _call(caller) == (method, texts, options | change), request


# No field takes this.
NOTHING = [[[True]]]
# Values that each field refuses besides, on every route that has it.
REFUSED: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (-2, "seven", 7.5, True),
    "truncation_side": ("up", "Left"),
    "truncation_direction": ("up", 1),
    "priority": ("urgent", 1.5),
    "timeout": (0, -1, "soon", "nan"),
    **dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc", "window_overlap"), (-1, "five")),
    **dict.fromkeys(("long_documents", "cache", "on_timeout", "on_error", "encoding", "modality"), ("all",)),
    **dict.fromkeys(("use_activation", "truncate", "truncation", "normalize", "explain"), ("yes", 2)),
    "documents": (7, ["a", 7]),
    "query": (7, ["q"], None),
    "texts": ("a", [7], [{"text": "a"}]),
    **dict.fromkeys(("top_n", "top_k"), (-1, "two", 1.5)),
    "score_threshold": ("high", "nan", "inf"),
    "aggregation_strategy": ("best", 1),
    "ignore_labels": ("O", [1]),
    "stride": (-1, "two", 1.5),
    **dict.fromkeys(("embed_dtype", "output_dtype", "output_encoding", "encoding_format"), ("float64", 1)),
    "embedding_type": ("float64", ["float", "binary"]),
    "embedding_types": ("float", ["int4"], ["int8"]),
    "cascade": ({}, [7], [{"model": "m", "keep": 0}], [{"model": "m", "keep": "all"}]),
    "input": (None, [], 7, True, {"a": 1}, [[]], ["a", 1], [1, "a"], [True], [[1], "a"], [[True]], [1.5]),
    "inputs": (
        *(None, [], 3, True, [[]], ["a", 1], {"a": "b"}, [["a"], ["b", "c"]], [["a", "b"], "c"]),
        *([["a", "b", "c"]], [["a", 1]]),
    ),
    "messages": ("a", []),
    "dimensions": (-1, "three", 1.5),
    "output_dimension": (0, -1, "three", 1.5),
    "input_type": ("poem", ""),
    "task": ("plugin", 1),
    "tokens": ("a", [-1], ["a"], [1.5], None),
    "ids": ("a", [-1], ["a"], [1.5], None, [1, [2]]),
    "labels": ("a", [7]),
    "label_token_ids": ("a", ["a"], [1.5]),
    "images": (["data:image/png;base64,"],),
    "chunks": ([1], [[1]], [[-1, 2]], [["a", 2]]),
    "muvera": ({"k_sim": -1}, {"r_reps": 0}, {"seed": 1.5}, {"full_length": "yes"}),
    "parameters": ("a", ["truncate"]),
}
# The same where a route refuses something else: texts come before inputs.
REFUSED_OF: dict[tuple[str, str], tuple[Any, ...]] = {
    **{(path, "inputs"): ("a", 3, [1]) for path in ("/v1/embed", "/v2/embed")},
    ("/v1/multimodalembeddings", "inputs"): (None, [], 3, "a", [1], [{"content": [{"type": "other"}]}]),
    **{(path, "dimensions"): (0, -1, "three", 1.5) for path in ("/embed", "/")},
    **{(path, "inputs"): (None, [], 3, True, [["a", 1]], ["a", 1]) for path in ("/similarity", "/")},
    ("/tokenize", "inputs"): (3, [1]),
    **{
        (path, "items"): (7, [], None, ["a", 7], [[1]])
        for path in ("/v1/label-scores", "/generative_scoring")
    },
    ("/predict_tokens", "inputs"): (
        None,
        [],
        3,
        True,
        [[]],
        ["a", 1],
        {"a": "b"},
        [["a", "b"]],
        [["a"], "b"],
    ),
    ("/v1/reranking", "input"): (7, ["a", 7]),
    ("/v1/ranking", "truncate"): ("START", True),
    # Only documents that are scored are read through windows.
    **{
        (path, "long_documents"): ("all", "window")
        for path in ("/v1/embeddings", "/pooling", "/classify", "/v1/token-classify")
    },
}
BODIES: dict[str, dict[str, Any]] = {path: body for path, body, *_ in PLAIN.values()} | {
    **dict.fromkeys(("/rerank", "/v1/reranking"), RERANK_BODY), "/pooling": {"input": "d"},
    "/tokenize": {"text": "a"}, "/detokenize": {"tokens": [1]}, "/": {"inputs": "d"}, "/decode": {"ids": [1]},
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
async def test_a_wrong_value_is_a_400_that_names_the_field(caller: Caller, path: str) -> None:
    for field in (field.name for field in msgspec.structs.fields(KINDS[path])):
        if field in wire.IGNORED_FIELDS - {"options"}:
            continue
        for value in (*REFUSED_OF.get((path, field), REFUSED.get(field, ())), NOTHING):
            error = await caller.refused(path, BODIES[path] | {field: value}, 400, field, field)
            assert (error["code"], error["type"]) == (400, "BadRequestError"), (field, value)
            assert caller.engine.calls == [], (field, value)


async def test_a_missing_field_is_a_400_that_names_it(caller: Caller) -> None:
    for path, body in BODIES.items():
        for field in body.keys() - {"queries"}:
            without = {name: value for name, value in body.items() if name != field}
            await caller.refused(path, without, 400, field, f"{field} is missing")


async def test_long_documents_of_the_server_hold_by_default(caller: Caller) -> None:
    for name in (*TRUNCATING, *TEI):
        windowed = WINDOW_LONG if name in (*SCORING, "documents") else CUT_LONG
        path, body, *_ = PLAIN[name]
        for setting, truncation in (("truncate", CUT_LONG), ("error", REFUSE), ("window", windowed)):
            one = Caller(caller.engine, long_documents=setting)
            await one.post(path, body)
            assert one.engine.calls[0][2]["truncation"] == truncation, (name, setting)


async def test_a_model_may_be_named_by_either_name_and_no_other(caller: Caller) -> None:
    caller = Caller(caller.engine, served_model_name=("mine",))
    # A path that has a name is the one that counts.
    for path in (each for each in POSTED if "MiniLM" not in each):
        body = GOOD["POST", path]
        usual = (await caller.post(path, body)).status
        for name in ("mine", "all-MiniLM-L6-v2", "default/not-specified", "", None):
            assert (await caller.post(path, body | {"model": name})).status == usual
        assert (await caller.refused(path, body | {"model": "nope"}, 404, "model"))["type"] == "NotFoundError"
    for path in ("/v1/inference/{}", "/v1/retrieval/{}/reranking"):
        body = GOOD["POST", path.format("all-MiniLM-L6-v2")] | {"model": "nope"}
        assert (await caller.post("/v1" + path.format("mine"), body)).status == 400  # as all requests here
        assert (await caller.post(path.format("%2F"), body | {"model": "mine"})).status == 404
        missing = "The model `org/nope` does not exist; served here: `mine`."
        await caller.refused(path.format("org%2Fnope"), body, 404, says=missing)


async def test_names_that_say_how_texts_are_read(engine: RecordingEngine) -> None:
    caller = Caller(engine, served_model_name=("mine", "mine:query", "a@b"))
    rank, embed = ("/rerank", RERANK_BODY), ("/v1/embeddings", {"input": "d"})
    with_task = (embed[0], {"input": "d", "task": "retrieval.query"})
    # A whole name that is served comes first.
    for (path, body), name in ((embed, "mine:document"), (embed, "a@b:document"), (rank, "mine:query")):
        assert (await caller.post(path, body | {"model": name})).status == 200
    for (path, body), name, says in (
        (rank, "mine:document", "`mine:document` is for texts to embed"),
        (("/pooling", {"input": "d", "task": "classify"}), "mine@b", "give the model's name alone"),
        (("/tokenize", {"prompt": "d"}), "mine@b", "give the model's name alone"),
        (embed, "mine@b", "no prompt named 'b'"),
        (with_task, "mine:document", "task 'retrieval.query' cont"),
        ((embed[0], {"input": "d", "prompt_name": "c"}), "mine@b", "contradicts the model's name `mine@b`"),
    ):
        await caller.refused(path, body | {"model": name}, 400, says=says)
    for name in ("nope:query", "nope@b", ":query", "mine:passage"):
        await caller.refused(embed[0], embed[1] | {"model": name}, 404, says=f"`{name}` does not exist")


async def test_token_ids_need_a_server_that_accepts_them(engine: RecordingEngine) -> None:
    caller, accepting = Caller(engine), Caller(engine, accept_token_ids=True)
    for path in ("/v1/embeddings", "/pooling", "/classify"):
        for given in ("a", ["a", "b"]):
            await caller.post(path, {"input": given})
            assert engine.calls[-1][1] == ([given] if isinstance(given, str) else given,)
        for ids in ([101, 102], [[101], [101, 102]]):
            engine.calls.clear()
            await caller.refused(path, {"input": ids}, 400, "input", "--accept-token-ids")
            assert engine.calls == []
            await accepting.post(path, {"input": ids})
            assert engine.calls[0][1] == (ids if isinstance(ids[0], list) else [ids],)
