"""The routes that classify: /classify and text-embeddings-inference's /predict."""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, new_id, now, usage_of
from maxsimd.api.handlers.embeddings import check_labels, encode_entries, read_inputs
from maxsimd.api.handlers.route import Form, Group, Shown, answer_of, post, tei_headers
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError

# Texts, their second texts if they are pairs, and whether there are many.
TextsOrPairs = tuple[list[str], list[str] | None, bool]

# The exponential of a logit beyond this is not a float32.
_STEEP = 80.0


class ClassifyRequest(wire.Common, kw_only=True):
    """For vLLM, or for Infinity with `raw_scores`, which its client always sends."""

    input: wire.Texts
    use_activation: Annotated[
        bool | None, about("Give probabilities; false gives logits. Default: true.", True)
    ] = None
    raw_scores: Annotated[
        bool | None, about("Infinity's: give all labels, as logits if true. Default: vLLM's shape.", False)
    ] = None


class PredictParameters(msgspec.Struct, kw_only=True):
    function_to_apply: Annotated[
        Literal["sigmoid", "softmax", "none"] | None,
        about("How logits become scores. Default: as the model says.", "softmax"),
    ] = None
    top_k: Annotated[wire.Positive | None, about("Number of labels a text gets. Default: all.", 1)] = None


class PredictRequest(msgspec.Struct, kw_only=True):
    """text-embeddings-inference's: a text, a pair of texts, or a list of lists of either. Hugging Face's has
    `parameters`, which its client always sends, and is answered by a list for each text even if it is one."""

    model: wire.ModelField = None
    parameters: Annotated[PredictParameters | None, about("Hugging Face's options.")] = None
    options: wire.Options = None
    inputs: wire.Sequences
    raw_scores: Annotated[bool | None, about("Give logits. Default: false.", False)] = None
    truncate: wire.Truncate = None
    truncation_direction: wire.TruncationDirection = None


_Label = Annotated[str, about("Label, as the model names it.", "positive")]


class Classification(msgspec.Struct):
    index: wire.Index
    label: _Label
    probs: Annotated[list[float], about("Probability of each label, in the model's order.", [0.07, 0.93])]
    num_classes: Annotated[int, about("Number of labels.", 2)]


class ClassifyResponse(wire.Warned):
    """vLLM's: the best label of each text."""

    id: wire.Id
    created: wire.Created
    model: wire.Model
    data: Annotated[list[Classification], about("The class of each text.")]
    usage: wire.UsageField
    object: wire.AlwaysList = "list"


class LabelScore(msgspec.Struct):
    score: Annotated[float, about("Probability, or a logit if the request asks for those.", 0.93)]
    label: _Label


class LabelsResponse(wire.Warned):
    """Infinity's: all labels of each text, best first."""

    id: wire.Id
    created: wire.Created
    model: wire.Model
    data: Annotated[list[list[LabelScore]], about("The labels of each text, best first.")]
    usage: wire.UsageField
    object: Annotated[Literal["classify"], about("Always `classify`.", "classify")] = "classify"


async def classify(state: ServerState, body: ClassifyRequest, inputs: reading.Inputs) -> Answer:
    """vLLM's shape, or Infinity's if `raw_scores` is there."""
    reading.check_token_ids(inputs, state.config.accept_token_ids)
    check_labels(state, len(inputs))
    model, wants_labels = state.model_name, body.raw_scores is not None
    result = await state.engine.classify(
        inputs,
        truncation=reading.truncation_of(body, state.config.long_documents),
        use_activation=body.use_activation is not False and not body.raw_scores,
        priority=body.priority or 0,
        tenant=state.tenant,
        timeout=body.timeout,
    )

    def build(warnings: wire.Warnings) -> ClassifyResponse | LabelsResponse:
        labels, usage = result.labels, usage_of(result.usage)
        if wants_labels:
            ranked = [encode_entries(_ranked(labels, row.tolist())) for row in result.scores]
            return LabelsResponse(new_id("classify"), now(), model, ranked, usage, warnings=warnings)
        data = [
            Classification(i, labels[row.argmax()], encode_entries(row.tolist()), len(labels))
            for i, row in enumerate(result.scores)
        ]
        return ClassifyResponse(new_id("classify"), now(), model, data, usage, warnings=warnings)

    return await answer_of(state, body, result, build, result.scores.size)


async def predict(state: ServerState, body: PredictRequest, sequences: TextsOrPairs) -> Answer:
    """text-embeddings-inference's shape: texts or pairs in, labels with scores out, best first."""
    texts, text_pairs, is_batch = sequences
    parameters = body.parameters or PredictParameters()
    apply = parameters.function_to_apply
    headers = tei_headers(state, [*texts, *(text_pairs or ())])
    check_labels(state, len(texts))
    with reading.with_request_field_names(input="inputs", queries="inputs", documents="inputs"):
        result = await state.engine.classify(
            texts,
            text_pairs=text_pairs,
            truncation=reading.truncation_by_switch(
                body.truncate, body.truncation_direction, state.config.long_documents
            ),
            use_activation=not body.raw_scores and apply is None,
            tenant=state.tenant,
            timeout=state.timeout,
        )

    def build(warnings: wire.Warnings) -> Any:
        rows = _scores_of_logits(result.scores, apply)
        answers = [encode_entries(_ranked(result.labels, row.tolist())[: parameters.top_k]) for row in rows]
        return answers if is_batch or body.parameters is not None else answers[0]

    return await answer_of(state, body, result, build, result.scores.size, tei=headers)


def _scores_of_logits(rows: NDArray[np.floating[Any]], function: str | None) -> NDArray[np.floating[Any]]:
    """Applies sigmoid or softmax. For None and none the rows stay as they are."""
    if function == "sigmoid":
        rows = 1 / (1 + np.exp(-np.clip(rows, -_STEEP, _STEEP)))
    elif function == "softmax":
        powers: NDArray[np.floating[Any]] = np.exp(rows - rows.max(axis=-1, keepdims=True))
        rows = powers / powers.sum(axis=-1, keepdims=True)
    return rows


def _ranked(labels: tuple[str, ...], row: list[float]) -> list[LabelScore]:
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return [LabelScore(row[i], labels[i]) for i in order]


def read_sequences(request: PredictRequest, most: int) -> TextsOrPairs:
    """Reads text-embeddings-inference's `inputs`."""
    value = request.inputs
    reading.check_count(value, "inputs", most)
    one = isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    given = [value] if one else value
    if isinstance(given, list) and given:
        sequences = [[item] if isinstance(item, str) else item for item in given]
        lengths = {_num_texts(sequence) for sequence in sequences}
        if lengths == {1}:
            return [sequence[0] for sequence in sequences], None, not one
        if lengths == {2}:
            return [pair[0] for pair in sequences], [pair[1] for pair in sequences], not one
    where = f"inputs[{given.index(None)}] is null: " if isinstance(given, list) and None in given else ""
    raise InvalidRequestError(
        f"{where}inputs must be a text, a pair of texts, or a list of lists of one text or two", "inputs"
    )


def _num_texts(sequence: Any) -> int:
    """The number of texts in a list; 0 for anything else."""
    is_short = isinstance(sequence, list) and len(sequence) <= 2
    return len(sequence) if is_short and all(isinstance(text, str) for text in sequence) else 0


CLASSIFY = Form(ClassifyRequest, read_inputs, classify, Wanted.CLASSES)
PREDICT = Form(PredictRequest, read_sequences, predict, Wanted.CLASSES)
# The answers to many texts, and to one.
PREDICTIONS = (list[list[LabelScore]], list[LabelScore])

ROUTES = (
    *post(
        ("/classify",),
        CLASSIFY,
        Shown(Group.CLASSIFY, "Classify texts", {"input": ["I liked it.", "It was dull."]}),
        ClassifyResponse,
        LabelsResponse,
    ),
    *post(
        ("/predict",),
        PREDICT,
        Shown(Group.TEI, "Classify texts or pairs of texts", {"inputs": "I liked it."}),
        *PREDICTIONS,
    ),
)
