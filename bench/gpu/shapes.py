"""The shapes that kernels are measured with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaxSimShape:
    """One query of `query` tokens, and `documents` whose lengths lie between the two numbers of `tokens`.

    With `rounded`, also documents in int8 are measured."""

    name: str
    query: int
    documents: int
    tokens: tuple[int, int]
    dim: int = 128
    rounded: bool = False


MAXSIM_SHAPES = (
    MaxSimShape("ColBERT, 10,000 documents of 180 tokens", 32, 10_000, (180, 180), rounded=True),
    MaxSimShape("ColPali, 500 pages of 1,024 tokens", 1024, 500, (1024, 1024), rounded=True),
    MaxSimShape("a query of 64 tokens, 10,000 documents of 180", 64, 10_000, (180, 180)),
    MaxSimShape("ragged, 1,000 documents of 20 to 340 tokens", 32, 1000, (20, 340)),
    MaxSimShape("one document of 8,192 tokens", 32, 1, (8192, 8192)),
)

# Those for which both packages publish figures.
PUBLISHED_SHAPES = (
    MaxSimShape("published, 10,000 documents of 300 tokens", 32, 10_000, (300, 300)),
    MaxSimShape("published, 1,000 pages of 1,024 tokens", 1024, 1000, (1024, 1024)),
    MaxSimShape("published, 1,000 documents of 1,024 tokens", 32, 1000, (1024, 1024)),
)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`sequences` of `tokens` tokens give or take a half, with `heads` heads of queries and `kv_heads` of
    keys and values."""

    name: str
    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


ATTENTION_SHAPES = (
    AttentionShape("XLM-RoBERTa large, 8 x 2,048 tokens", 8, 2048, 16, 16, 64, False),
    AttentionShape("XLM-RoBERTa large, 16 x 1,024 tokens", 16, 1024, 16, 16, 64, False),
    AttentionShape("XLM-RoBERTa large, 128 x 128 tokens", 128, 128, 16, 16, 64, False),
    AttentionShape("Qwen3 0.6B, 16 x 1,024 tokens", 16, 1024, 16, 8, 128, True),
)
