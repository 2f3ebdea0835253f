"""Jinja templates: how a language model is asked about a pair, and how checkpoints write texts as chats."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError

# Tests that do not look into a text.
_OF_TYPE = frozenset({"defined", "iterable", "mapping", "none", "string", "undefined"})
# Fields of a message or one of its parts that a condition may read.
_FIELDS = ("role", "type")
# Placeholders for the texts while a template is rendered, from Unicode's private use area.
_QUERY, _DOCUMENT, _INSTRUCTION = "\ue0a0", "\ue0a1", "\ue0a2"
_NOT_HELD = (
    "{} holds a character of Unicode's private use (U+E0A0 or U+E0A1) that this model's template cannot "
    "hold; leave it out"
)


# Texts, and None in place of each picture.
Parts: TypeAlias = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Frame:
    """One rendered segment: the text `before` the document and `after` it, or all of it in `before`."""

    before: str
    after: str | None


@dataclass(frozen=True, slots=True)
class WrittenPair:
    """The text of a pair with pictures, the part `before` the document that all pairs of the query share, and
    whether the query's pictures come first."""

    text: str
    before: str
    query_first: bool


@dataclass(frozen=True, eq=False)
class ScoreTemplate:
    """Segments of Jinja, each rendered and tokenized by itself, as model cards put their inputs together.

    A segment may name `query`, `document`, `instruction` and the `variables`, or go through `messages` with
    the roles system (the instruction), query and document, as sentence-transformers' templates do. It sees
    messages alone if it is `by_messages`. Their contents are lists of texts and pictures with `in_parts`;
    else `picture` stands for one in a text. The `trailing_ids` follow all that is written. With
    `marks_document` the tokens of the segment with the document have type 1, all others 0. A truncated pair
    keeps what the template writes at its end if it `restores_end`. The `source` is the model of the card.
    """

    segments: tuple[str, ...]
    instruction: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    in_parts: bool = False
    picture: str = ""
    trailing_ids: tuple[int, ...] = ()
    marks_document: bool = False
    restores_end: bool = True
    by_messages: bool = False
    source: str = ""

    def pair(self, query: Parts, document: Parts, instruction: str | None, image_token: str) -> WrittenPair:
        """The text of a pair of contents: texts, and None for each picture, for which the `image_token` is
        written. Raises InvalidRequestError for a text with a character that stands for a document here."""
        given = "".join(part for part in (*query, instruction) if part)
        if _DOCUMENT in given:
            raise InvalidRequestError(_NOT_HELD.format("a query beside a picture"), "queries")
        used = instruction or self.instruction
        before = "".join(self._render(segment, used, query) for segment in self.segments)
        written = "".join(self._render(segment, used, query, document) for segment in self.segments)
        before = before[: max(0, before.find(_DOCUMENT))]
        query_first = before.count(image_token) == query.count(None)
        # A start that depends on the document cannot be shared.
        return WrittenPair(written, before if written.startswith(before) else "", query_first)

    def frames(self, query: str, instruction: str | None) -> list[Frame] | None:
        """One frame a segment, with the query and the instruction (or the template's own) inserted. Unless
        the template `is_plain`, it may write some texts otherwise.

        None for a template that does not write the document once, or a checkpoint's own that writes it before
        the query. Raises InvalidRequestError for an instruction with a character that stands for a text."""
        used = instruction or self.instruction
        if used and (_QUERY in used or _DOCUMENT in used):
            raise InvalidRequestError(_NOT_HELD.format("instruction"), "instruction")
        rendered = [self._render(segment, used) for segment in self.segments]
        written = "".join(rendered)
        if written.count(_DOCUMENT) != 1:
            return None
        # sentence-transformers truncates the query of such a pair that is too long.
        if self.by_messages and _QUERY in written.partition(_DOCUMENT)[2]:
            return None
        frames = []
        for segment in rendered:
            before, found, after = (part.replace(_QUERY, query) for part in segment.partition(_DOCUMENT))
            frames.append(Frame(before, after if found else None))
        return frames

    def written(self, query: str, document: str, instruction: str | None) -> list[str]:
        """The segments as they are written for a pair, each to be tokenized by itself."""
        used = instruction or self.instruction
        return [self._render(segment, used, (query,), (document,)) for segment in self.segments]

    @cached_property
    def is_plain(self) -> bool:
        """Whether the template certainly writes all texts as they are, because none of its filters, functions
        and conditions sees into one."""
        return all(map(_is_plain, self.segments))

    def check(self) -> None:
        """Raises ModelLoadError unless the query and the document make a difference to what is written."""
        written = self.written("1", "2", None)
        for role, texts in (("document", ("1", "a 3")), ("query", ("a 3", "2"))):
            if self.written(*texts, None) == written:
                raise ModelLoadError(f"the score template has no place for the {role}")

    @property
    def takes_instruction(self) -> bool:
        try:
            return any(_INSTRUCTION in self._render(segment, _INSTRUCTION) for segment in self.segments)
        except ModelLoadError:  # it refuses a system message
            return False

    def _render(
        self, segment: str, instruction: str | None, query: Parts = (_QUERY,), document: Parts = (_DOCUMENT,)
    ) -> str:
        contents = {"query": query, "document": document}
        if instruction:
            contents = {"system": (instruction,), **contents}
        written: Callable[[Parts], Any] = _in_parts if self.in_parts else self._joined
        messages = [{"role": role, "content": written(parts)} for role, parts in contents.items()]
        texts = {"query": self._joined(query), "document": self._joined(document), "instruction": instruction}
        named = {} if self.by_messages else texts
        try:
            from transformers.utils.chat_template_utils import render_jinja_template

            rendered, _ = render_jinja_template([messages], chat_template=segment, **named, **self.variables)
        except Exception as error:
            raise ModelLoadError(f"the score template cannot be rendered: {error}") from error
        return str(rendered[0])

    def _joined(self, parts: Parts) -> str:
        return "".join(self.picture if part is None else part for part in parts)


def _in_parts(parts: Parts) -> list[dict[str, str]]:
    """Texts, and for each None a picture, as parts of a message."""
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


def score_template_file(config: EngineConfig) -> Path | None:
    """The file that `score_template` names, None where it is Jinja itself or not given."""
    given = config.score_template
    return None if given is None or "{{" in given or "{%" in given else Path(given)


def score_template(config: EngineConfig) -> ScoreTemplate | None:
    """The template that the configuration names, as Jinja or as a file of it. Raises ModelLoadError."""
    given, file = config.score_template, score_template_file(config)
    if given is None:
        return None
    if file is not None and not file.is_file():
        raise ModelLoadError(f"the score template {given!r} is neither Jinja nor a file")
    template = ScoreTemplate((given if file is None else file.read_text(encoding="utf-8"),))
    template.check()
    return template


@lru_cache(maxsize=64)
def _is_plain(segment: str) -> bool:
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(segment)
    except TemplateSyntaxError:  # tags that only transformers knows
        return False
    # The names that may come to hold a text.
    stored = {each.name for each in tree.find_all(nodes.Name) if each.ctx == "store"}
    texts = {"query", "document", "messages", *stored}
    passing = (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr),
        *(nodes.Assign, nodes.Concat, nodes.Add, nodes.Break, nodes.Continue),
    )

    def writes_as_is(node: Any) -> bool:
        """Whether a node can neither change a text nor do one thing or another by a look at it."""
        match node:
            case nodes.Filter(name="default"):
                # A second argument would replace empty texts too.
                is_for_undefined = [type(each) for each in node.args] == [nodes.Const] and not node.kwargs
                return is_for_undefined and writes_as_is(node.node)
            case nodes.Filter():
                return picks(node)
            case nodes.Getitem(arg=nodes.Const(value=key)):
                # A number picks a message, and of a text would pick a character.
                return (isinstance(key, str) or is_messages(node.node)) and writes_as_is(node.node)
            case nodes.If():
                return is_blind(node.test) and all(map(writes_as_is, [*node.body, *node.elif_, *node.else_]))
            case nodes.CondExpr():
                parts = [each for each in (node.expr1, node.expr2) if each is not None]
                return is_blind(node.test) and all(map(writes_as_is, parts))
            case nodes.For():
                over_messages = is_messages(node.iter) or picks(node.iter)
                is_whole = node.test is None or is_blind(node.test)
                return over_messages and is_whole and all(map(writes_as_is, [*node.body, *node.else_]))
        return isinstance(node, passing) and all(map(writes_as_is, node.iter_child_nodes()))

    def is_messages(node: Any) -> bool:
        return isinstance(node, nodes.Name) and node.name == "messages"

    def picks(node: Any) -> bool:
        """Whether a chain of filters picks messages, or one field of them; the last may pick one."""
        is_last = True
        while isinstance(node, nodes.Filter):
            match node.name:
                case "map":
                    keeps = not node.args and all(each.key == "attribute" for each in node.kwargs)
                case "selectattr" | "rejectattr":
                    keeps = any(getattr(field, "value", None) in _FIELDS for field in node.args[:1])
                case "first" | "last":
                    keeps = is_last
                case name:
                    keeps = name == "list"
            if not keeps:
                return False
            node, is_last = node.node, False
        return not is_last and is_messages(node)

    def is_blind(test: Any) -> bool:
        """Whether a condition has the same outcome for all texts."""
        match test:
            case nodes.And() | nodes.Or():
                return is_blind(test.left) and is_blind(test.right)
            case nodes.Not():
                return is_blind(test.node)
            case nodes.Test():
                return test.name in _OF_TYPE and not test.args
            case nodes.Compare():
                return all(map(is_kind, [test.expr, *(each.expr for each in test.ops)]))
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return True
            case nodes.Name():
                return test.name not in texts
        return isinstance(test, nodes.Const)

    def is_kind(compared: Any) -> bool:
        """Whether what is compared is a constant, or the role or type of a message."""
        match compared:
            case nodes.List() | nodes.Tuple():
                return all(isinstance(each, nodes.Const) for each in compared.items)
            case nodes.Getattr(attr=key) | nodes.Getitem(arg=nodes.Const(value=key)):
                return key in _FIELDS
        return isinstance(compared, nodes.Const)

    return writes_as_is(tree)


class ChatRole:
    """A checkpoint's chat template for texts in one role: a query, a document, or neither.

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
        """The text before a text. Raises InvalidRequestError for a prompt that cannot be written."""
        if not prompt:
            return self._around("")[0]
        if _QUERY in prompt:
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
        """The text before a text in two parts: up to a special token, and the rest, with which the text may
        merge. Raises InvalidRequestError for a prompt that cannot be written."""
        before = self.before(prompt)
        end = max((found.end() for found in self._special.finditer(before)), default=0)
        return before[:end], before[end:]

    def content(self, parts: Parts, prompt: str) -> str:
        """Renders a query or a document of texts and, for each None, a picture."""
        return self._rendered(_in_parts(parts), prompt)

    def conversation(self, messages: Sequence[dict[str, str]], **options: bool) -> str:
        """Renders messages of "role" and "content". Raises InvalidRequestError where the template takes no
        such messages."""
        in_parts = self._formatter.message_format != "flat"
        given = [
            {**message, "content": _in_parts([message["content"]])} if in_parts else message
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
        before, *after = self._rendered(_in_parts([_QUERY]), prompt).split(_QUERY)
        if len(after) != 1:
            raise ModelLoadError(f"the chat template writes a text {len(after)} times, not once")
        return before, after[0]

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
            before, after = self._around(_INSTRUCTION)
        except ModelLoadError:
            return False
        return before.count(_INSTRUCTION) == 1 and after == self.after
