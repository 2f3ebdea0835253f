"""Models without weights, and a tokenizer whose tokens are words, so that ids can be counted by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.cache.store import MemoryStore
from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.processor import Plan, PrefixSharing, ProcessorContext, RequestIds
from maxsimd.engine.processors.registry import Processors
from maxsimd.engine.processors.text.builder import LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import REFUSE_LONG, ScoreRequest, Truncation

PAD, UNKNOWN, CLS, SEP, MASK, QUERY_MARKER, DOCUMENT_MARKER = range(7)
_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[QUERY]", "[DOCUMENT]"]
_OTHERS = ["a", "b", "query:", "passage:", "instruct:", "Instruct:", "Query:"]
_WORDS = 1000
A, B, QUERY_PROMPT, DOCUMENT_PROMPT, INSTRUCT, INSTRUCT_LABEL, QUERY_LABEL = range(7, 14)
FIRST_WORD = len(_SPECIALS) + len(_OTHERS)
VOCABULARY = FIRST_WORD + _WORDS
DOCUMENT = 500  # the first word of documents


def words(length: int, start: int = 0) -> str:
    return " ".join(f"w{i}" for i in range(start, start + length))


def ids(length: int, start: int = 0) -> list[int]:
    return [FIRST_WORD + i for i in range(start, start + length)]


def document(length: int) -> str:
    return words(length, DOCUMENT)


def fast_tokenizer(special_tokens: bool = True) -> Any:
    """One token a word; [CLS] and [SEP] around texts as BERT has them, or nothing."""
    tokens = [*_SPECIALS, *_OTHERS, *(f"w{i}" for i in range(_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token) for token in ("[QUERY]", "[DOCUMENT]")])
    if special_tokens:
        single, pair, used = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", CLS), ("[SEP]", SEP)]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@cache
def tokenizer(special_tokens: bool = True) -> TextTokenizer:
    return TextTokenizer(fast_tokenizer(special_tokens))


def model(**changes: Any) -> LoadedModel:
    """A late-interaction model without rules of its own for roles, but for the changes."""
    settings: dict[str, Any] = {
        "name": "small", "score_type": ScoreType.LATE_INTERACTION, "backbone": torch.nn.Identity(),
        "tokenizer": None, "tasks": {}, "score_task": "token_embed", "query": RoleRules(),
        "document": RoleRules(), "max_tokens": 64, "causal": False, "position_offset": 0,
        "takes_type_ids": True, "activation": torch.sigmoid, "architecture": "none",
        "file_dtype": torch.float32,
    }  # fmt: skip
    return LoadedModel(**settings | changes)


def processors(
    described: LoadedModel, *, special_tokens: bool = True, longest: int = 10000, overlap: int = 0,
    most_vectors: int | None = None, cache: EmbeddingCache | None = None,
    sharing: PrefixSharing | None = None, text_tokenizer: TextTokenizer | None = None,
) -> Processors:  # fmt: skip
    longest = min(longest, described.max_tokens)
    limits = LengthLimits(longest, overlap, described.truncation_side, most_vectors)
    used = text_tokenizer or tokenizer(special_tokens)
    return Processors(ProcessorContext(described, used, limits, cache, sharing))


def request_ids(request_id: int = 7, first: int = 100, most_tokens: int = 10_000_000) -> RequestIds:
    """The ids of request 7, whose sequences are numbered from 100."""
    return RequestIds(request_id, count(first), most_tokens)


def score_request(
    queries: list[str], documents: list[str], truncation: Truncation = REFUSE_LONG, **options: Any
) -> ScoreRequest:
    return ScoreRequest(queries=tuple(queries), documents=tuple(documents), truncation=truncation, **options)


def tokens_of(plan: Plan) -> list[list[int]]:
    return [sequence.tokens.ids.tolist() for sequence in plan.sequences]


def empty_cache() -> EmbeddingCache:
    return EmbeddingCache(b"", "float32", MemoryStore(1 << 24), None)


def embedding(rows: int = 3, tokens: int = 3, truncated: bool = False) -> CachedEmbedding:
    return CachedEmbedding(torch.zeros(rows, 2), None, tokens, truncated)


@contextmanager
def refused(param: str, match: str) -> Iterator[None]:
    with pytest.raises(InvalidRequestError, match=match) as error:
        yield
    assert error.value.param == param
