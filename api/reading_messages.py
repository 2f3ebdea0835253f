"""The messages of a chat in requests for vectors, as vLLM takes them."""

from typing import NamedTuple

import msgspec

from maxsimd.api.reading import Inputs, as_text, check_count, inputs_of
from maxsimd.api.wire import EmbeddingsRequest
from maxsimd.engine import InvalidRequestError


class Chat(NamedTuple):
    """Messages of "role" and "content", to be read as one text."""

    messages: list[dict[str, str]]


def inputs_or_chat_of(request: EmbeddingsRequest, most: int) -> Inputs | Chat:
    """The texts, or the messages, of which there may be at most a number."""
    if request.messages is None:
        return inputs_of(request, most)
    for name in ("chat_template", "chat_template_kwargs"):
        if getattr(request, name):
            raise InvalidRequestError(f"{name} cannot be chosen; the model's own template is used", name)
    if request.input is not msgspec.UNSET:
        raise InvalidRequestError("input and messages exclude each other; leave out one", "messages")
    check_count(request.messages, "messages", most)
    if not request.messages:
        raise InvalidRequestError("messages is empty; give at least one", "messages")
    return Chat(
        [
            {
                "role": message.role,
                "content": as_text({"content": message.content}, f"messages[{i}]", "messages"),
            }
            for i, message in enumerate(request.messages)
        ]
    )
