"""Chat templates by which checkpoints write queries and documents, as sentence-transformers uses them: what
is read is a user's message, and a prompt the system's."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from maxsimd.engine.errors import InvalidRequestError, ModelLoadError

# In place of a text while a template is rendered, from Unicode's private use area.
_TEXT = "\ue0a0"
_PROMPT = "\ue0a1"


class ChatRole:
    """How a checkpoint's template writes what is read in one role: a query, a document, or neither.

    Thread-safe. Raises ModelLoadError for a template that does not write a text as it is, once."""

    def __init__(self, transformer: Any, role: str | None) -> None:
        self._processor = transformer.processor
        self._formatter = transformer.input_formatter
        settings = dict((transformer.processing_kwargs or {}).get("chat_template") or {})
        settings.pop("restore_suffix", None)
        if role is not None and transformer._chat_template_declares_task():
            settings = {"task": role, **settings}
        self._settings = settings
        self._around = lru_cache(maxsize=16)(self._rendered_around)
        _, self.after = self._around("")
        self.takes_prompt = self._takes_prompt()
        # The longest first, where one begins with another.
        special = sorted(transformer.tokenizer.added_tokens_encoder, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    @property
    def signature(self) -> str:
        """All that decides what is written."""
        template = self._processor.chat_template or self._processor.tokenizer.chat_template
        return json.dumps([template, self._settings, self._formatter.message_format], default=str)

    def before(self, prompt: str) -> str:
        """What stands before a text. Raises InvalidRequestError for a prompt that cannot be written."""
        if not prompt:
            return self._around("")[0]
        if _TEXT in prompt:
            raise InvalidRequestError(
                "the instruction or prompt holds a character of Unicode's private use (U+E0A0) that this "
                "model's template cannot hold; leave it out",
                "instruction",
            )
        try:
            before, after = self._around(prompt)
        except ModelLoadError as error:
            raise InvalidRequestError(f"the prompt does not fit the model's template: {error}") from None
        if after != self.after:
            raise InvalidRequestError("the model's template writes a prompt behind the text; leave it out")
        return before

    def parts_before(self, prompt: str) -> tuple[str, str]:
        """What stands before a text: what ends with a special token, and the rest, with which the text may
        merge. Raises InvalidRequestError for a prompt that cannot be written."""
        before = self.before(prompt)
        ends = [found.end() for found in self._special.finditer(before)]
        end = ends[-1] if ends else 0
        return before[:end], before[end:]

    def content(self, parts: Sequence[str | None], prompt: str) -> str:
        """What a query or a document becomes that has texts and, each in place of None, pictures."""
        return self._rendered(
            [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts], prompt
        )

    def conversation(self, messages: Sequence[dict[str, str]], **options: bool) -> str:
        """What messages of "role" and "content" become. Raises InvalidRequestError where the template takes
        no such messages."""
        in_parts = self._formatter.message_format != "flat"
        given = [
            {**message, "content": [{"type": "text", "text": message["content"]}]} if in_parts else message
            for message in messages
        ]
        try:
            settings = {**self._settings, **options}
            return str(self._processor.apply_chat_template(given, tokenize=False, **settings))
        except Exception as error:
            raise InvalidRequestError(
                f"the model's chat template does not take these messages: {error}", "messages"
            ) from None

    def _rendered_around(self, prompt: str) -> tuple[str, str]:
        rendered = self._rendered([{"type": "text", "text": _TEXT}], prompt)
        if rendered.count(_TEXT) != 1:
            raise ModelLoadError(f"the chat template writes a text {rendered.count(_TEXT)} times, not once")
        before, after = rendered.split(_TEXT)
        return before, after

    def _rendered(self, content: list[dict[str, str]], prompt: str) -> str:
        message: dict[str, Any] = {"role": "user", "content": content}
        messages = [message]
        try:
            if self._formatter.message_format == "flat":
                message["content"] = "".join(part["text"] for part in content)
            if prompt:
                (messages,) = self._formatter.prepend_prompt_to_messages([messages], prompt)
            return str(self._processor.apply_chat_template(messages, tokenize=False, **self._settings))
        except Exception as error:
            raise ModelLoadError(f"the chat template cannot be rendered: {error}") from error

    def _takes_prompt(self) -> bool:
        try:
            before, after = self._around(_PROMPT)
        except ModelLoadError:
            return False
        return before.count(_PROMPT) == 1 and after == self.after
