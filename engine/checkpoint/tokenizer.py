"""A checkpoint's tokenizer without transformers: the tokenizers library, and the special tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer


class TokenizerFacts(msgspec.Struct, frozen=True):
    """Facts that transformers knows and tokenizer.json lacks."""

    model_input_names: tuple[str, ...]
    model_max_length: int
    all_special_ids: tuple[int, ...]


class PlainTokenizer:
    """Has the attributes of transformers' fast tokenizers that serving reads."""

    def __init__(self, backend: Tokenizer, facts: TokenizerFacts) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self.model_input_names = list(facts.model_input_names)
        self.model_max_length = facts.model_max_length
        self.all_special_ids = list(facts.all_special_ids)

    def __call__(self, text: str, pair: str | None = None) -> Mapping[str, list[int]]:
        """The token ids of a text or pair with its special tokens, and token types where the model reads
        them."""
        encoded = self.backend_tokenizer.encode(text, pair)
        made: dict[str, list[int]] = {"input_ids": encoded.ids}
        if "token_type_ids" in self.model_input_names:
            made["token_type_ids"] = encoded.type_ids
        return made

    def __len__(self) -> int:
        """How many tokens there are, the added ones included."""
        return int(self.backend_tokenizer.get_vocab_size())

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return str(self.backend_tokenizer.id_to_token(token_id))


def facts_of(tokenizer: Any) -> TokenizerFacts:
    """Takes the facts from one of transformers' tokenizers."""
    return TokenizerFacts(
        tuple(tokenizer.model_input_names),
        int(tokenizer.model_max_length),
        tuple(map(int, tokenizer.all_special_ids)),
    )
