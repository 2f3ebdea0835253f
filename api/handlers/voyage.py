"""Voyage's route for vectors of texts and pictures. Its others are beside those that they resemble."""

from maxsimd.api import wire_voyage
from maxsimd.api.answer import Answer, usage_of, wire_answer
from maxsimd.api.handlers.embedding import check_embeddings
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import check_count, input_called, input_type_of, texts_and_pictures
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.vectors import encoded
from maxsimd.engine import InvalidRequestError, Truncation
from maxsimd.engine.media import Content


async def multimodal_embeddings(
    state: ServerState,
    body: wire_voyage.MultimodalRequest,
    inputs: list[str | Content],
    tenant: str,
) -> Answer:
    """What has pictures is never cut."""
    cut = state.config.long_documents != "error" if body.truncation is None else body.truncation
    check_embeddings(state, len(inputs), None)
    with input_called("inputs"):
        result = await state.engine.embed(
            inputs,
            input_type=input_type_of(body.input_type),
            truncation=Truncation(max_tokens=-1 if cut else None),
            tenant=tenant,
        )
    warnings, model = warnings_of(result.truncated, state.field_warnings, body), state.model_name
    as_base64 = body.output_encoding == "base64"

    def build() -> wire_voyage.MultimodalResponse:
        rows = [encoded(row, "float32", as_base64).data for row in result.embeddings]
        data = [wire_voyage.MultimodalEmbedding(embedding=row, index=i) for i, row in enumerate(rows)]
        return wire_voyage.MultimodalResponse(
            data=data, model=model, usage=usage_of(result.usage), warnings=warnings
        )

    answer = await wire_answer(build, result.embeddings.size)
    return answer.with_timings(result.timings).with_warnings(warnings)


def _inputs_of(request: wire_voyage.MultimodalRequest, most: int) -> list[str | Content]:
    check_count(request.inputs, "inputs", most)
    if not request.inputs:
        raise InvalidRequestError("inputs is empty; give at least one", "inputs")
    return [*texts_and_pictures(request.inputs, "inputs")]


ROUTES = (
    post_texts(
        "/v1/multimodalembeddings",
        wire_voyage.MultimodalRequest,
        _inputs_of,
        multimodal_embeddings,
        wire_voyage.MultimodalResponse,
        wanted=Wanted.VECTORS,
    ),
)
