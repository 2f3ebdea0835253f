"""Ollama's routes for vectors and for the version, which its clients ask first."""

from maxsimd.api import wire_ollama
from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.embedding import check_embeddings, in_unit_length
from maxsimd.api.handlers.operating import show_version
from maxsimd.api.handlers.route import get, post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import Inputs, as_inputs, check_token_ids
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.vectors import encode_rows
from maxsimd.engine import Truncation


async def embed(
    state: ServerState, body: wire_ollama.OllamaEmbedRequest, inputs: Inputs, tenant: str
) -> Answer:
    """Gives one vector of length 1 for each text."""
    check_token_ids(inputs, state.config.accept_token_ids)
    dimensions, model = body.dimensions or None, state.model_name
    check_embeddings(state, len(inputs), dimensions)
    truncates = state.config.long_documents != "error" if body.truncate is None else body.truncate
    result = await state.engine.embed(
        inputs,
        dimensions=dimensions,
        truncation=Truncation(max_tokens=-1 if truncates else None),
        tenant=tenant,
    )
    warnings, timings = warnings_of(result.truncated, state.field_warnings, body), result.timings

    def build() -> wire_ollama.OllamaEmbedResponse:
        return wire_ollama.OllamaEmbedResponse(
            model=model,
            embeddings=[encode_rows(row) for row in in_unit_length(result.embeddings)],
            total_duration=round((timings.queue + timings.tokenise + timings.model) * 1e9),
            prompt_eval_count=result.usage.prompt_tokens,
            warnings=warnings,
        )

    answer = await wire_answer(build, result.embeddings.size)
    return answer.with_timings(timings).with_warnings(warnings)


ROUTES = (
    post_texts(
        "/api/embed",
        wire_ollama.OllamaEmbedRequest,
        lambda request, most: as_inputs(request.input, most),
        embed,
        wire_ollama.OllamaEmbedResponse,
        wanted=Wanted.VECTORS,
    ),
    get("/api/version", show_version),
)
