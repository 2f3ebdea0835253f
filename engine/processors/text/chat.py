"""The messages of a chat as one text, by the checkpoint's own template."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from maxsimd.engine.errors import InvalidRequestError


def chat_text(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """Messages of "role" and "content" as the template of a checkpoint's tokenizer writes them, special
    tokens included. Raises InvalidRequestError where there is no template, or none for such messages."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("this model has no chat template; send the text as input", "messages")
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"the model's chat template does not take these messages: {error}", "messages"
        ) from None
    return text
