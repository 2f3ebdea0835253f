"""The routes that show how the model reads a text: as tokens, and back."""

from collections.abc import Sequence

import msgspec

from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.route import post
from maxsimd.api.reading import check_count
from maxsimd.api.state import ServerState
from maxsimd.api.wire import Name, NotNegative, RequestBody
from maxsimd.engine import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.processors.text.tokenization import MOST_DECODED, TextTokenizer

_MOST_CHARACTERS = 2_000_000


class TokenizeRequest(RequestBody, kw_only=True):
    """vLLM's with `text` or `prompt`, text-embeddings-inference's with `inputs`."""

    model: Name | None = None
    text: str | None = None
    prompt: str | None = None
    inputs: str | list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def unused_fields(self) -> frozenset[str]:
        if self.inputs is not None:
            return frozenset({"text", "prompt", "return_token_strs"})
        return frozenset() if self.text is None else frozenset({"prompt"})


class TokenizeResponse(msgspec.Struct):
    """The tokens are lists that have been written already: of numbers, and of strings."""

    tokens: msgspec.Raw
    count: int
    max_model_len: int
    token_strs: msgspec.Raw | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[NotNegative]
    model: Name | None = None


class TeiToken(msgspec.Struct):
    """A token and the characters that it stands for; special ones stand for none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


async def tokenize(state: ServerState, body: TokenizeRequest) -> Answer:
    if body.inputs is not None:
        return await _tokenize_inputs(state, body)
    param, text = ("text", body.text) if body.text is not None else ("prompt", body.prompt)
    if text is None:
        raise InvalidRequestError("text is missing", "text")
    _check_characters(len(text), param)
    tokenizer, longest = state.engine.tokenizer, state.engine.max_tokens
    with_strings, (before, after) = bool(body.return_token_strs), _special_tokens(tokenizer, body)

    def answer() -> bytes:
        ids, strings = _JsonList(), _JsonList()
        ids.extend(before)
        strings.extend([tokenizer.token(token) for token in before])
        for _, encoding in tokenizer.read(text, param):
            ids.extend(encoding.ids)
            if with_strings:
                strings.extend(encoding.tokens)
        ids.extend(after)
        strings.extend([tokenizer.token(token) for token in after])
        shown = strings.as_json() if with_strings else None
        return msgspec.json.encode(TokenizeResponse(ids.as_json(), ids.length, longest, shown))

    return Answer(200, {"Content-Type": "application/json"}, await state.engine.in_thread(answer, len(text)))


async def _tokenize_inputs(state: ServerState, body: TokenizeRequest) -> Answer:
    """text-embeddings-inference's shape: tokens with their characters."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs or []
    check_count(texts, "inputs", state.config.max_documents)
    _check_characters(sum(map(len, texts)), "inputs")
    tokenizer = state.engine.tokenizer
    before, after = (
        [_special(tokenizer, token) for token in part] for part in _special_tokens(tokenizer, body)
    )

    def tokens_of(text: str) -> msgspec.Raw:
        tokens = _JsonList()
        tokens.extend(before)
        for start, encoding in tokenizer.read(text, "inputs"):
            spans = [(start + first, start + last) for first, last in encoding.offsets]
            tokens.extend(
                [
                    TeiToken(token, text[first:last], special=False, start=first, stop=last)
                    for token, (first, last) in zip(encoding.ids, spans, strict=True)
                ]
            )
        tokens.extend(after)
        return tokens.as_json()

    size = sum(map(len, texts)) + len(texts)
    answer = await state.engine.in_thread(
        lambda: msgspec.json.encode([tokens_of(text) for text in texts]), size
    )
    return Answer(200, {"Content-Type": "application/json"}, answer)


def _check_characters(number: int, param: str) -> None:
    """Refuses more text than is tokenized at once: the answer is many times larger."""
    if number > _MOST_CHARACTERS:
        raise RequestTooLargeError(
            f"{param} has {number:,} characters, but at most {_MOST_CHARACTERS:,} become tokens at once; "
            "send fewer"
        )


def _special_tokens(tokenizer: TextTokenizer, body: TokenizeRequest) -> tuple[list[int], list[int]]:
    """Special tokens before and after a text, unless the request wants none."""
    if body.add_special_tokens is False:
        return [], []
    before, after = (part.tolist() for part in tokenizer.single.ids)
    return before, after


def _special(tokenizer: TextTokenizer, token: int) -> TeiToken:
    return TeiToken(token, tokenizer.token(token), special=True, start=None, stop=None)


async def detokenize(state: ServerState, body: DetokenizeRequest) -> Answer:
    tokens, tokenizer = body.tokens, state.engine.tokenizer
    check_number_decoded(len(tokens), "tokens")
    text = await state.engine.in_thread(lambda: decoded(tokenizer, tokens, "tokens"), len(tokens))
    return await wire_answer(lambda: {"text": text, "prompt": text}, 1, 2 * len(text))


def check_number_decoded(number: int, param: str) -> None:
    """Refuses more tokens than are decoded at once."""
    if number > MOST_DECODED:
        raise InvalidRequestError(
            f"{param} has {number} tokens, but at most {MOST_DECODED} are decoded at once; send fewer", param
        )


class _JsonList:
    """A list that becomes JSON as it grows: a long text's tokens take many times more memory as Python's
    objects."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def extend(self, items: Sequence[int | str | TeiToken]) -> None:
        if items:
            self._parts.append(msgspec.json.encode(items)[1:-1])
            self.length += len(items)

    def as_json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


def decoded(
    tokenizer: TextTokenizer, tokens: list[int], param: str, skip_special_tokens: bool = False
) -> str:
    """The text of tokens, which came in the field `param`. Raises InvalidRequestError for unknown ids."""
    if tokens and max(tokens) >= tokenizer.vocabulary_size:
        raise InvalidRequestError(f"{param} must be below {tokenizer.vocabulary_size}", param)
    return tokenizer.decode(tokens, skip_special_tokens)


ROUTES = (
    post("/tokenize", TokenizeRequest, tokenize, TokenizeResponse, list[list[TeiToken]]),
    post("/detokenize", DetokenizeRequest, detokenize, dict[str, str]),
)
