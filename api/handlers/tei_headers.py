"""The headers in which text-embeddings-inference says what an answer took; times in whole milliseconds."""

from collections.abc import Iterable

from maxsimd.api.answer import Answer
from maxsimd.api.state import ServerState
from maxsimd.engine import ClassifyResult, EmbedResult, RerankResult, TokenEmbedResult


def with_tei_headers(
    answer: Answer,
    state: ServerState,
    result: EmbedResult | TokenEmbedResult | ClassifyResult | RerankResult,
    texts: Iterable[str | list[int]],
) -> Answer:
    """The answer to `texts`, with the same times in the server's own header too."""
    timings = result.timings
    total = timings.queue + timings.tokenise + timings.model
    times = {"total": total, "tokenization": timings.tokenise, "queue": timings.queue}
    own = {f"x_{name}_time": _milliseconds(seconds) for name, seconds in times.items()}
    return answer.with_timings(timings).with_headers(
        x_compute_type="cpu" if state.engine.device_model.device.type == "cpu" else "gpu",
        x_compute_time=_milliseconds(total),
        x_compute_characters=str(sum(len(text) for text in texts if isinstance(text, str))),
        x_compute_tokens=str(result.usage.prompt_tokens),
        x_inference_time=_milliseconds(timings.model),
        **own,
    )


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1e3))
