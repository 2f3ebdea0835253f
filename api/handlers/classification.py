"""The routes that classify: /classify and text-embeddings-inference's /predict."""

from typing import Any

from maxsimd.api import wire, wire_tei
from maxsimd.api.answer import Answer, new_id, now, usage_of, warnings_of, wire_answer
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.handlers.tei_headers import TeiHeaders
from maxsimd.api.reading import (
    check_token_ids,
    inputs_of,
    sequences_of,
    tei_truncation_of,
    truncation_of,
)
from maxsimd.api.state import ServerState


async def classify(
    state: ServerState, body: wire.ClassifyRequest, inputs: list[str] | list[list[int]], tenant: str
) -> Answer:
    check_token_ids(inputs, state.config.accept_token_ids)
    model = state.model_name
    result = await state.engine.classify(
        inputs,
        truncation=truncation_of(body, state.config.long_documents),
        use_activation=body.use_activation is not False,
        priority=body.priority or 0,
        tenant=tenant,
        timeout=body.timeout,
    )

    warnings = warnings_of(result.truncated)

    def build() -> wire.ClassifyResponse:
        labels = result.labels
        data = [
            wire.Classification(i, labels[row.argmax()], row.tolist(), len(labels))
            for i, row in enumerate(result.scores)
        ]
        usage = usage_of(result.usage)
        return wire.ClassifyResponse(new_id("classify"), now(), model, data, usage, warnings=warnings)

    answer = await wire_answer(build, len(result.scores))
    return answer.with_timings(result.timings).with_warnings(warnings)


async def predict(
    state: ServerState,
    body: wire.PredictRequest,
    sequences: tuple[list[str], list[str] | None, bool],
    tenant: str,
) -> Answer:
    """text-embeddings-inference's: texts or pairs of texts in, labels with scores out, best first."""
    texts, text_pairs, is_batch = sequences
    headers = TeiHeaders(state, [*texts, *(text_pairs or ())])
    result = await state.engine.classify(
        texts,
        text_pairs=text_pairs,
        truncation=tei_truncation_of(body, state.config.long_documents),
        use_activation=not body.raw_scores,
        tenant=tenant,
    )

    def build() -> Any:
        answers = [_ranked(result.labels, row.tolist()) for row in result.scores]
        return answers if is_batch else answers[0]

    answer = await wire_answer(build, len(result.scores))
    return headers.added_to(answer, result)


def _ranked(labels: tuple[str, ...], row: list[float]) -> list[wire_tei.TeiPrediction]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return [wire_tei.TeiPrediction(row[i], labels[i]) for i in order]


# Of many texts, and of one.
PREDICTIONS = (list[list[wire_tei.TeiPrediction]], list[wire_tei.TeiPrediction])

ROUTES = (
    post_texts("/classify", wire.ClassifyRequest, inputs_of, classify, wire.ClassifyResponse),
    post_texts("/predict", wire.PredictRequest, sequences_of, predict, *PREDICTIONS),
)
