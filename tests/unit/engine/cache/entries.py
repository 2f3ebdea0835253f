"""Entries of a cache that tests tell apart by a number."""

import torch

from maxsimd.engine.cache import CachedEmbedding

MIB = 1024 * 1024
DAMAGED_FILE = "maxsimd-embeddings.damaged.sqlite3"


def entry(seed: int, rows: int = 2, dim: int = 4) -> CachedEmbedding:
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    return CachedEmbedding(values, None, rows, False)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def same(one: CachedEmbedding | None, other: CachedEmbedding) -> bool:
    if one is None or (one.tokens, one.truncated) != (other.tokens, other.truncated):
        return False
    return torch.equal(one.rows, other.rows)
