"""The wire types of Ollama's /api/embed, as msgspec structs."""

from typing import Any

import msgspec

from maxsimd.api.wire import Name, NotNegative, Warned
from maxsimd.api.wire_texts import Texts


class OllamaOptions(msgspec.Struct):
    """Options of a model's runner, such as `num_ctx`: none is read, and each is named in a warning."""


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    model: Name | None = None
    input: Texts
    truncate: bool | None = None
    # 0 is for all, as in Ollama.
    dimensions: NotNegative | None = None
    options: OllamaOptions | None = None


class OllamaEmbedResponse(Warned, kw_only=True):
    """Durations are in nanoseconds. The model is loaded before the server takes requests."""

    model: str
    embeddings: list[Any]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int
