"""The headers in which text-embeddings-inference says what an answer took; times in whole milliseconds."""

from collections.abc import Iterable

from maxsimd.api.answer import Answer
from maxsimd.api.request_warnings import warnings_of
from maxsimd.api.state import ServerState
from maxsimd.engine import ClassifyResult, EmbedResult, RerankResult, SparseEmbedResult, TokenEmbedResult


class TeiHeaders:
    """Those of the answer to `texts`; to be made before these are run, since the engine may die meanwhile."""

    def __init__(self, state: ServerState, texts: Iterable[object]) -> None:
        self._device = "cpu" if state.engine.facts.device == "cpu" else "gpu"
        self._field_warnings = state.field_warnings
        self._characters = sum(len(text) for text in texts if isinstance(text, str))

    def added_to(
        self,
        answer: Answer,
        result: EmbedResult | TokenEmbedResult | SparseEmbedResult | ClassifyResult | RerankResult,
        *warnings: str,
    ) -> Answer:
        """The answer with these headers, and with the server's own: timing and warnings, given ones too."""
        timings = result.timings
        total = timings.queue + timings.tokenise + timings.model
        complete = answer.with_timings(timings).with_warnings(
            [*(warnings_of(result.truncated, self._field_warnings) or ()), *warnings]
        )
        return complete.with_headers(
            x_compute_type=self._device,
            x_compute_time=_milliseconds(total),
            x_compute_characters=str(self._characters),
            x_compute_tokens=str(result.usage.prompt_tokens),
            x_total_time=_milliseconds(total),
            x_tokenization_time=_milliseconds(timings.tokenise),
            x_queue_time=_milliseconds(timings.queue),
            x_inference_time=_milliseconds(timings.model),
        )


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1e3))
