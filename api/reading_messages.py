"""The messages of a chat in requests for vectors, as vLLM takes them."""

from typing import NamedTuple

import msgspec

from maxsimd.api.reading import Inputs, as_text, check_count, inputs_of
from maxsimd.api.reading_pictures import content_of, has_pictures
from maxsimd.api.wire import EmbeddingsRequest
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import Content


class Chat(NamedTuple):
    """Messages of "role" and "content", to be read as one text."""

    messages: list[dict[str, str]]


def inputs_or_chat_of(request: EmbeddingsRequest, most: int) -> Inputs | Chat:
    """The texts and pictures, or the messages, of which there may be at most a number. A message with a
    picture is a document, not a chat."""
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
    contents = [{"content": message.content} for message in request.messages]
    if any(map(has_pictures, contents)):
        if len(contents) > 1:
            raise InvalidRequestError(
                "messages with pictures are read one at a time; send a single message", "messages"
            )
        document: list[str | Content] = [content_of(contents[0], "messages[0]", "messages")]
        return document
    return Chat(
        [
            {
                "role": message.role,
                "content": as_text({"content": message.content}, f"messages[{i}]", "messages"),
            }
            for i, message in enumerate(request.messages)
        ]
    )
