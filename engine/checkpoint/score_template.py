"""Templates by which a language model is asked about a pair: Jinja over query, document and instruction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxsimd.engine.errors import InvalidRequestError, ModelLoadError

# Placeholders for the texts while a template is rendered, from Unicode's private use area.
_QUERY, _DOCUMENT, _INSTRUCTION = "\ue0a0", "\ue0a1", "\ue0a2"
_NOT_HELD = (
    "{} holds a character of Unicode's private use (U+E0A0 or U+E0A1) that this model's template cannot "
    "hold; leave it out"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One rendered segment: the text `before` the document and `after` it, or all of it in `before`."""

    before: str
    after: str | None


@dataclass(frozen=True, slots=True)
class WrittenPair:
    """The text of a pair that has pictures: what stands `before` the document in all pairs of the query, and
    whether the query's pictures come first."""

    text: str
    before: str
    query_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTemplate:
    """Segments of Jinja, each rendered and tokenised by itself, as model cards put their inputs together.

    A segment may name `query`, `document` and `instruction`, or go through `messages`, which have the roles
    system (the instruction), query and document, as sentence-transformers' chat templates for rerankers do.
    `variables` are handed to it as well. The document occurs once in all segments. With `in_parts` the
    content of a message is a list of parts, and a picture is one; else `picture` stands for one in a text.
    Behind all that is written stand the `trailing_ids`, tokens that no text has. With `marks_document` the
    tokens of the segment with the document have type 1, all others 0.
    """

    segments: tuple[str, ...]
    instruction: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    in_parts: bool = False
    picture: str = ""
    trailing_ids: tuple[int, ...] = ()
    marks_document: bool = False

    def pair(
        self,
        query: Sequence[str | None],
        document: Sequence[str | None],
        instruction: str | None,
        image_token: str,
    ) -> "WrittenPair":
        """The text of a pair of contents, which have texts and, each in place of None, pictures, for which
        the `image_token` is written. Raises InvalidRequestError for a text with a character that stands for a
        document here."""
        given = "".join(part for part in (*query, instruction) if part)
        if _DOCUMENT in given:
            raise InvalidRequestError(_NOT_HELD.format("a query beside a picture"), "queries")
        used = instruction or self.instruction
        before = "".join(self._render(segment, used, query) for segment in self.segments)
        written = "".join(self._render(segment, used, query, document) for segment in self.segments)
        before = before[: before.index(_DOCUMENT)]
        query_first = before.count(image_token) == query.count(None)
        # Where it depends on the document, nothing is shared.
        return WrittenPair(written, before if written.startswith(before) else "", query_first)

    def frames(self, query: str, instruction: str | None) -> list[Frame]:
        """One frame a segment, with the query and the instruction (or the template's own) inserted. Raises
        InvalidRequestError for an instruction with a character that stands for a text here."""
        used = instruction or self.instruction
        if used and (_QUERY in used or _DOCUMENT in used):
            raise InvalidRequestError(_NOT_HELD.format("instruction"), "instruction")
        frames = []
        for segment in self.segments:
            rendered = self._render(segment, used)
            before, *after = [part.replace(_QUERY, query) for part in rendered.split(_DOCUMENT)]
            frames.append(Frame(before, after[0] if after else None))
        return frames

    def written(self, query: str, document: str, instruction: str | None) -> list[str]:
        """The segments as they are written for a pair, each to be tokenized by itself."""
        used = instruction or self.instruction
        return [self._render(segment, used, (query,), (document,)) for segment in self.segments]

    def check(self) -> None:
        """Raises ModelLoadError unless the template has the query, and the document exactly once."""
        rendered = [self._render(segment, self.instruction or "") for segment in self.segments]
        count = sum(segment.count(_DOCUMENT) for segment in rendered)
        if count != 1:
            raise ModelLoadError(f"the score template must have one place for the document, not {count}")
        if not any(_QUERY in segment for segment in rendered):
            raise ModelLoadError("the score template has no place for the query")

    @property
    def takes_instruction(self) -> bool:
        return any(_INSTRUCTION in self._render(segment, _INSTRUCTION) for segment in self.segments)

    def _render(
        self,
        segment: str,
        instruction: str | None,
        query: Sequence[str | None] = (_QUERY,),
        document: Sequence[str | None] = (_DOCUMENT,),
    ) -> str:
        contents = {"query": query, "document": document}
        if instruction:
            contents = {"system": (instruction,), **contents}
        messages = [{"role": role, "content": self._content(parts)} for role, parts in contents.items()]
        texts = {
            "query": self._joined(query),
            "document": self._joined(document),
            "instruction": instruction,
        }
        try:
            from transformers.utils.chat_template_utils import render_jinja_template

            rendered, _ = render_jinja_template([messages], chat_template=segment, **texts, **self.variables)
        except Exception as error:
            raise ModelLoadError(f"the score template cannot be rendered: {error}") from error
        return str(rendered[0])

    def _content(self, parts: Sequence[str | None]) -> Any:
        if not self.in_parts:
            return self._joined(parts)
        return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]

    def _joined(self, parts: Sequence[str | None]) -> str:
        return "".join(self.picture if part is None else part for part in parts)
