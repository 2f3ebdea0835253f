"""The routes that show how the model reads a text: as tokens, and back."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.route import Form, Group, Shown, no_texts, post
from maxsimd.api.models import Wanted
from maxsimd.api.reading import check_count
from maxsimd.api.state import ServerState
from maxsimd.api.wire import QUERY, ModelField, NotNegative, RequestBody, about
from maxsimd.engine import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.processors.text.tokenization import MOST_DECODED, TextTokenizer, ids_of, in_turn, spans_of

_MOST_CHARACTERS = 2_000_000
# A token takes up to about 80 bytes in an answer, which is copied twice as it is written.
_BYTES_A_TOKEN = 240


class TokenizeRequest(RequestBody, kw_only=True):
    """vLLM's with `text` or `prompt`, text-embeddings-inference's with `inputs`."""

    model: ModelField = None
    text: Annotated[str | None, about("Text of up to 2 million characters.", QUERY)] = None
    prompt: Annotated[str | None, about("vLLM's name for `text`.", QUERY)] = None
    inputs: Annotated[str | list[str] | None, about("text-embeddings-inference's texts.", [QUERY])] = None
    add_special_tokens: Annotated[
        bool | None, about("Add the model's special tokens. Default: true.", True)
    ] = None
    return_token_strs: Annotated[
        bool | None, about("Give the tokens as strings too. Default: false.", True)
    ] = None

    def unused_fields(self) -> frozenset[str]:
        if self.inputs is not None:
            return frozenset({"text", "prompt", "return_token_strs"})
        return frozenset() if self.text is None else frozenset({"prompt"})


class TokenizeResponse(msgspec.Struct):
    # Lists that are written already.
    tokens: Annotated[
        Any, about("Token ids.", [101, 2054, 102], schema={"type": "array", "items": {"type": "integer"}})
    ]
    count: Annotated[int, about("Number of tokens.", 3)]
    max_model_len: Annotated[int, about("Most tokens that the model reads.", 512)]
    token_strs: Annotated[
        Any,
        about(
            "Tokens as strings, if the request asks for them.",
            ["[CLS]", "what", "[SEP]"],
            schema={"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        ),
    ] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[NotNegative], about("Token ids.", [2054, 2003])]
    model: ModelField = None


class DetokenizeResponse(msgspec.Struct):
    text: Annotated[str, about("Text of the tokens.", "what is")]
    prompt: Annotated[str, about("The same, as vLLM calls it.", "what is")]


class TeiToken(msgspec.Struct):
    """A token and its characters; special ones have none."""

    id: Annotated[int, about("Token id.", 2054)]
    text: Annotated[str, about("Characters of the token.", "What")]
    special: Annotated[bool, about("Whether the model adds it by itself.", False)]
    start: Annotated[int | None, about("First character in the text.", 0)]
    stop: Annotated[int | None, about("Character after the last.", 4)]


async def tokenize(state: ServerState, body: TokenizeRequest, nothing: None) -> Answer:
    if body.inputs is not None:
        return await _tokenize_inputs(state, body)
    param, text = ("text", body.text) if body.text is not None else ("prompt", body.prompt)
    if text is None:
        raise InvalidRequestError("text is missing", "text")
    _check_characters(len(text), param)
    tokenizer, longest = state.engine.tokenizer, state.engine.max_tokens
    with_strings, (before, after) = bool(body.return_token_strs), _special_tokens(tokenizer, body)
    room = _Room(state.bodies.most, param)

    def answer() -> bytes:
        ids, strings = _JsonList(), _JsonList()
        ids.extend(before)
        strings.extend([tokenizer.token(token) for token in before])
        for _, encoding in tokenizer.read(text, param):
            room.take(len(encoding))
            read, shown = ids_of(encoding), encoding.tokens if with_strings else []
            for part in in_turn(len(read)):
                ids.extend(read[part].tolist())
                strings.extend(shown[part])
        ids.extend(after)
        strings.extend([tokenizer.token(token) for token in after])
        token_strs = strings.as_json() if with_strings else None
        return msgspec.json.encode(TokenizeResponse(ids.as_json(), ids.length, longest, token_strs))

    return Answer(200, {"Content-Type": "application/json"}, await state.engine.in_thread(answer, len(text)))


async def _tokenize_inputs(state: ServerState, body: TokenizeRequest) -> Answer:
    """text-embeddings-inference's shape: tokens with their characters."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs or []
    check_count(texts, "inputs", state.config.max_documents)
    _check_characters(sum(map(len, texts)), "inputs")
    tokenizer, room = state.engine.tokenizer, _Room(state.bodies.most, "inputs")
    before, after = (
        [TeiToken(token, tokenizer.token(token), special=True, start=None, stop=None) for token in part]
        for part in _special_tokens(tokenizer, body)
    )

    def tokens_of(text: str) -> list[bytes]:
        tokens = _JsonList()
        tokens.extend(before)
        for start, encoding in tokenizer.read(text, "inputs"):
            room.take(len(encoding))
            ids, spans = ids_of(encoding), spans_of(encoding, start)
            for part in in_turn(len(ids)):
                tokens.extend(
                    [
                        TeiToken(token, text[first:last], special=False, start=first, stop=last)
                        for token, (first, last) in zip(ids[part].tolist(), spans[part].tolist(), strict=True)
                    ]
                )
        tokens.extend(after)
        return tokens.parts()

    size = sum(map(len, texts)) + len(texts)

    def answer() -> bytes:
        written = [part for text in texts for part in (b",", *tokens_of(text))]
        # Joining large parts leaves Python's lock to others, which writing them as one value does not.
        return b"".join([b"[", *written[1:], b"]"])

    return Answer(200, {"Content-Type": "application/json"}, await state.engine.in_thread(answer, size))


def _check_characters(number: int, param: str) -> None:
    """Refuses more text than is tokenized at once: the answer is many times larger."""
    if number > _MOST_CHARACTERS:
        raise RequestTooLargeError(
            f"{param} has {number:,} characters, but at most {_MOST_CHARACTERS:,} become tokens at once; "
            "send fewer"
        )


class _Room:
    """Tokens that an answer has room for, so that it takes no more memory than all bodies may."""

    def __init__(self, most_bytes: int, param: str) -> None:
        self._most = self._left = most_bytes // _BYTES_A_TOKEN
        self._param = param

    def take(self, tokens: int) -> None:
        """Raises RequestTooLargeError if there are more."""
        self._left -= tokens
        if self._left < 0:
            raise RequestTooLargeError(
                f"{self._param} has more than the {self._most} tokens that an answer has room for; send "
                "fewer characters at a time, or raise --limit max_bodies_mb"
            )


def _special_tokens(tokenizer: TextTokenizer, body: TokenizeRequest) -> tuple[list[int], list[int]]:
    """Special tokens before and after a text, unless the request wants none."""
    if body.add_special_tokens is False:
        return [], []
    before, after = (part.tolist() for part in tokenizer.single.ids)
    return before, after


async def detokenize(state: ServerState, body: DetokenizeRequest, nothing: None) -> Answer:
    tokens, tokenizer = body.tokens, state.engine.tokenizer
    check_number_decoded(len(tokens), "tokens")
    text = await state.engine.in_thread(lambda: decoded(tokenizer, tokens, "tokens"), len(tokens))
    return await wire_answer(lambda: DetokenizeResponse(text, text), 1, 2 * len(text))


def check_number_decoded(number: int, param: str) -> None:
    """Refuses more tokens than are decoded at once."""
    if number > MOST_DECODED:
        raise InvalidRequestError(
            f"{param} has {number} tokens, but at most {MOST_DECODED} are decoded at once; send fewer", param
        )


class _JsonList:
    """A list that becomes JSON as it grows: Python's objects would take many times more memory."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def extend(self, items: Sequence[int | str | TeiToken]) -> None:
        if items:
            self._parts += [b"," if self._parts else b"[", msgspec.json.encode(items)[1:-1]]
            self.length += len(items)

    def parts(self) -> list[bytes]:
        return [*(self._parts or [b"["]), b"]"]

    def as_json(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join(self.parts()))


def decoded(
    tokenizer: TextTokenizer, tokens: list[int], param: str, skip_special_tokens: bool = False
) -> str:
    """The text of tokens, which came in the field `param`. Raises InvalidRequestError for unknown ids."""
    if tokens and max(tokens) >= tokenizer.vocabulary_size:
        raise InvalidRequestError(f"{param} must be below {tokenizer.vocabulary_size}", param)
    return tokenizer.decode(tokens, skip_special_tokens)


ROUTES = (
    *post(
        ("/tokenize",),
        Form(TokenizeRequest, no_texts, tokenize, Wanted.ANYTHING),
        Shown(Group.TOKENS, "Split a text into tokens", {"text": QUERY, "return_token_strs": True}),
        TokenizeResponse,
        list[list[TeiToken]],
    ),
    *post(
        ("/detokenize",),
        Form(DetokenizeRequest, no_texts, detokenize, Wanted.ANYTHING),
        Shown(Group.TOKENS, "Join tokens to a text", {"tokens": [2054, 2003]}),
        DetokenizeResponse,
    ),
)
