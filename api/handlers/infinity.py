"""Infinity's own shapes where they differ from others', under a base URL of their own, /infinity: requests to
/rerank do not say whose they are. All its other paths are answered there as they are without it."""

from typing import Any

from maxsimd.api import wire_reranks
from maxsimd.api.answer import Answer, json_page, new_id, now, usage_of, wire_answer
from maxsimd.api.handlers.operating import card
from maxsimd.api.handlers.ranking import characters_of, check_all_ranked, rank, scale_of, with_scale
from maxsimd.api.handlers.route import get, post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import ToRank, as_item, as_items, check_count, rank_places, truncation_of
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState

BASE = "/infinity"
_BASES = (BASE, f"{BASE}/v1")


async def rerank(
    state: ServerState, body: wire_reranks.InfinityRequest, texts: ToRank, tenant: str
) -> Answer:
    """Documents are strings in the answer, and only if they are asked for."""
    check_all_ranked(body)
    truncation = truncation_of(body, state.config.long_documents)
    model, scale = state.model_name, scale_of(state, body)
    result = await rank(state, body, texts, truncation, tenant, top_n=body.top_n)
    warnings = warnings_of(result.truncated, state.field_warnings, body)
    with_texts = bool(body.return_documents)

    def build() -> wire_reranks.InfinityResponse:
        return wire_reranks.InfinityResponse(
            id=new_id("rerank"),
            model=model,
            results=[
                wire_reranks.InfinityRanked(one.score, one.index, one.text if with_texts else None)
                for one in result.results
            ],
            usage=usage_of(result.usage),
            created=now(),
            warnings=warnings,
        )

    answer = await wire_answer(build, len(result.results), characters_of(result) if with_texts else 0)
    return with_scale(answer, scale).with_timings(result.timings).with_warnings(warnings)


async def models(state: ServerState) -> Answer:
    return json_page({"object": "list", "data": [_card(state, name) for name in state.model_names]})


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """Its client takes no other owner, and wants some figures of what goes on."""
    load = state.serving(name, Wanted.ANYTHING).engine.stats()
    return card(state, name) | {
        "owned_by": "infinity",
        "backend": "torch",
        "stats": {"queue_absolute": load.waiting_sequences, "results_pending": load.open_requests},
    }


def _documents_to_rank(request: wire_reranks.InfinityRequest, most: int) -> ToRank:
    query = as_item(request.query, "query", "query")
    check_count(request.documents, "documents", most)
    return query, as_items(request.documents, "documents", rank_places(request.rank_fields))


ROUTES = (
    *(
        post_texts(
            f"{base}/rerank",
            wire_reranks.InfinityRequest,
            _documents_to_rank,
            rerank,
            wire_reranks.InfinityResponse,
            wanted=Wanted.RANKING,
        )
        for base in _BASES
    ),
    *(get(f"{base}/models", models) for base in _BASES),
)
