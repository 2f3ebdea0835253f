"""The routes that show how the model reads a text: as tokens, and back."""

from collections.abc import Sequence

import msgspec

from maxsimd.api import wire
from maxsimd.api.answer import Answer, wire_answer
from maxsimd.api.handlers.route import post
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.preprocess.tokenization import MOST_DECODED, TextTokenizer


async def tokenize(state: ServerState, body: wire.TokenizeRequest) -> Answer:
    param, text = ("text", body.text) if body.text is not None else ("prompt", body.prompt)
    if text is None:
        raise InvalidRequestError("text is missing", "text")
    tokenizer, longest = state.engine.tokenizer, state.engine.max_tokens
    with_strings = bool(body.return_token_strs)

    def answer() -> bytes:
        ids, strings = _List(), _List()
        before, after = (part.tolist() for part in tokenizer.single.ids)
        ids.extend(before)
        strings.extend([tokenizer.token(token) for token in before])
        for encoding in tokenizer.read(text, param):
            ids.extend(encoding.ids)
            if with_strings:
                strings.extend(encoding.tokens)
        ids.extend(after)
        strings.extend([tokenizer.token(token) for token in after])
        shown = strings.written() if with_strings else None
        return msgspec.json.encode(wire.TokenizeResponse(ids.written(), ids.length, longest, shown))

    return Answer(200, {"Content-Type": "application/json"}, await state.engine.in_thread(answer, len(text)))


async def detokenize(state: ServerState, body: wire.DetokenizeRequest) -> Answer:
    tokens, tokenizer = body.tokens, state.engine.tokenizer
    if len(tokens) > MOST_DECODED:
        raise InvalidRequestError(
            f"tokens has {len(tokens)} tokens, but at most {MOST_DECODED} are decoded at once; send fewer",
            "tokens",
        )
    text = await state.engine.in_thread(lambda: _decoded(tokenizer, tokens), len(tokens))
    return await wire_answer(lambda: {"text": text, "prompt": text}, 1, 2 * len(text))


class _List:
    """A list that is written in JSON as it grows: the tokens of a long text take many times more memory as
    Python's objects."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def extend(self, items: Sequence[int | str]) -> None:
        if items:
            self._parts.append(msgspec.json.encode(items)[1:-1])
            self.length += len(items)

    def written(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


def _decoded(tokenizer: TextTokenizer, tokens: list[int]) -> str:
    if tokens and max(tokens) >= tokenizer.vocabulary_size:
        raise InvalidRequestError(f"tokens must be below {tokenizer.vocabulary_size}", "tokens")
    return tokenizer.decode(tokens)


ROUTES = (
    post("/tokenize", wire.TokenizeRequest, tokenize),
    post("/detokenize", wire.DetokenizeRequest, detokenize),
)
