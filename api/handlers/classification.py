"""The routes that classify: /classify and text-embeddings-inference's /predict."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.api import wire, wire_labels
from maxsimd.api.answer import Answer, new_id, now, usage_of, wire_answer
from maxsimd.api.handlers.embedding import check_labels
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.handlers.tei_headers import TeiHeaders
from maxsimd.api.models import Wanted
from maxsimd.api.reading import (
    Inputs,
    check_token_ids,
    inputs_of,
    sequences_of,
    tei_truncation_of,
    truncation_of,
)
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.api.vectors import written

# Of a logit beyond this the exponential is not a float32.
_STEEP = 80.0


async def classify(state: ServerState, body: wire.ClassifyRequest, inputs: Inputs, tenant: str) -> Answer:
    """vLLM's; in Infinity's words where `raw_scores` says either."""
    check_token_ids(inputs, state.config.accept_token_ids)
    check_labels(state, len(inputs))
    model, wants_labels = state.model_name, body.raw_scores is not None
    result = await state.engine.classify(
        inputs,
        truncation=truncation_of(body, state.config.long_documents),
        use_activation=body.use_activation is not False and not body.raw_scores,
        priority=body.priority or 0,
        tenant=tenant,
        timeout=body.timeout,
    )

    warnings = warnings_of(result.truncated, state.field_warnings, body)

    def build() -> wire.ClassifyResponse | wire_labels.LabelsResponse:
        labels, usage = result.labels, usage_of(result.usage)
        if wants_labels:
            ranked = [written(_ranked(labels, row.tolist())) for row in result.scores]
            return wire_labels.LabelsResponse(
                new_id("classify"), now(), model, ranked, usage, warnings=warnings
            )
        data = [
            wire.Classification(i, labels[row.argmax()], written(row.tolist()), len(labels))
            for i, row in enumerate(result.scores)
        ]
        return wire.ClassifyResponse(new_id("classify"), now(), model, data, usage, warnings=warnings)

    answer = await wire_answer(build, result.scores.size)
    return answer.with_timings(result.timings).with_warnings(warnings)


async def predict(
    state: ServerState,
    body: wire.PredictRequest,
    sequences: tuple[list[str], list[str] | None, bool],
    tenant: str,
) -> Answer:
    """text-embeddings-inference's: texts or pairs of texts in, labels with scores out, best first."""
    texts, text_pairs, is_batch = sequences
    parameters = body.parameters or wire.PredictParameters()
    apply = parameters.function_to_apply
    headers = TeiHeaders(state, [*texts, *(text_pairs or ())])
    check_labels(state, len(texts))
    result = await state.engine.classify(
        texts,
        text_pairs=text_pairs,
        truncation=tei_truncation_of(body, state.config.long_documents),
        use_activation=not body.raw_scores and apply is None,
        tenant=tenant,
    )

    def build() -> Any:
        rows = _applied(apply, result.scores)
        answers = [written(_ranked(result.labels, row.tolist())[: parameters.top_k]) for row in rows]
        return answers if is_batch or body.parameters is not None else answers[0]

    answer = await wire_answer(build, result.scores.size)
    return headers.added_to(answer, result)


def _applied(function: str | None, rows: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Scores of logits; for None and none the rows as they are."""
    if function == "sigmoid":
        rows = 1 / (1 + np.exp(-np.clip(rows, -_STEEP, _STEEP)))
    elif function == "softmax":
        powers: NDArray[np.floating[Any]] = np.exp(rows - rows.max(axis=-1, keepdims=True))
        rows = powers / powers.sum(axis=-1, keepdims=True)
    return rows


def _ranked(labels: tuple[str, ...], row: list[float]) -> list[wire_labels.LabelScore]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return [wire_labels.LabelScore(row[i], labels[i]) for i in order]


# Of many texts, and of one.
PREDICTIONS = (list[list[wire_labels.LabelScore]], list[wire_labels.LabelScore])

ROUTES = (
    post_texts(
        "/classify",
        wire.ClassifyRequest,
        inputs_of,
        classify,
        wire.ClassifyResponse,
        wire_labels.LabelsResponse,
        wanted=Wanted.CLASSES,
    ),
    post_texts("/predict", wire.PredictRequest, sequences_of, predict, *PREDICTIONS, wanted=Wanted.CLASSES),
)
