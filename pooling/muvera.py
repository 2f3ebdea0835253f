"""Fixed dimensional encodings: one vector per token matrix. Their inner products approximate MaxSim.

Source: Dhulipala, Hadian, Jayaram, Lee & Mirrokni 2024, "MUVERA: Multi-Vector Retrieval via Fixed Dimensional
Encodings" (arXiv 2405.19504).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged, runs
from maxsimd.pooling.vectors import Embedding, Vectors

_STEP = np.uint64(0x9E3779B97F4A7C15)
# Normal numbers are rounded to multiples of its inverse: machines differ in the last bits of a logarithm.
_NORMAL_STEPS = 65_536


def draws(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """The first draws of a stream: integers from 0 to 2^64 - 1, [count]. They are the same in every version
    and on every machine, so that encodings stay comparable.

    SplitMix64 (Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators"), on unsigned
    integers of 64 bits, all modulo 2^64: draw n = 1, 2, ... of a state s is mix(s + n * 0x9E3779B97F4A7C15).
    The state of stream t of a seed is draw 1 of the state (draw 1 of the state seed) + t."""
    state = _draw(_draw(np.array([seed], dtype=np.uint64), 1) + np.uint64(stream), 1)
    return _draw(state, np.arange(1, count + 1, dtype=np.uint64))


def normals(seed: int, stream: int, count: int) -> NDArray[np.float64]:
    """Numbers from the standard normal distribution, rounded to multiples of 1/65536: float64 [count].

    By Box & Muller (1958): draws 2i and 2i + 1, counted from 0, of which the 53 highest bits are a and b,
    give r cos(w) and r sin(w), where r = sqrt(-2 log((a + 1) / 2^53)) and w = 2 pi b / 2^53."""
    pairs = (draws(seed, stream, count + count % 2) >> np.uint64(11)).astype(np.float64).reshape(-1, 2)
    radius = np.sqrt(-2 * np.log((pairs[:, 0] + 1) * 2.0**-53))
    angle = 2 * np.pi * (pairs[:, 1] * 2.0**-53)
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
    return np.asarray(np.rint(both * _NORMAL_STEPS) / _NORMAL_STEPS)


def _signs(drawn: NDArray[np.uint64]) -> NDArray[np.float32]:
    """1 where the highest bit of a draw is 0, else -1."""
    return np.where(drawn >> np.uint64(63), -1, 1).astype(np.float32)


def _draw(state: NDArray[np.uint64], number: NDArray[np.uint64] | int) -> NDArray[np.uint64]:
    """Unsigned integers in arrays wrap around as intended."""
    mixed = state + np.asarray(number, dtype=np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


# The most numbers of an encoding, hyperplanes of a repetition, and random vectors of all repetitions.
LONGEST, MOST_PLANES, MOST_RANDOM = 262_144, 12, 8_192
# The most matrices, rows, and numbers of vectors that are encoded together.
_TOGETHER, _ROWS_TOGETHER, _NUMBERS_TOGETHER = 64, 16_384, 1 << 21
# The streams of random numbers.
_HYPERPLANES, _PROJECTIONS, _SKETCH = 0, 1, 2
# Farther than any token. A differing bit counts more than any token's index.
_NOWHERE, _A_BIT = 1 << 62, 1 << 32
# Shorter vectors are not scaled up.
_SHORTEST = 1e-12


@dataclass(frozen=True, slots=True)
class Muvera:
    """Makes vectors of token matrices. Only vectors of equal parameters are comparable.

    In each of `r_reps` repetitions a token x falls into one of 2^`k_sim` regions: bit i of the region's
    number, of value 2^i, is 1 if <g_i, x> > 0, for normal random g_i (SimHash). The token counts as S x /
    sqrt(`d_proj`), with S random signs [d_proj, dim], or as x itself if `d_proj` is None. A query has the sum
    of its tokens in each region. A document has their mean and, in a region without tokens, the first token
    whose region differs in the fewest bits. The vector is all regions of all repetitions end to end, divided
    by sqrt(r_reps): r_reps * 2^k_sim * d_proj numbers. `d_final` shortens it by a count sketch: number j is
    added, with a random sign, to a random one of d_final numbers.

    The mean of different tokens is shorter than they are, while MaxSim takes one token at its full length.
    `full_length`, which is not in the paper, scales a document's vector in each region to the mean length of
    its tokens there before they are projected.

    The random numbers come from streams of `seed` (see `draws`): g [r_reps, k_sim, dim] from stream 0, S
    [r_reps, d_proj, dim] from stream 1, in row order, and the sketch from stream 2. Regions are computed in
    float64, all else in float32. Raises ValueError for invalid parameters."""

    k_sim: int = 3
    r_reps: int = 40
    d_proj: int | None = 32
    d_final: int | None = None
    full_length: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.k_sim <= MOST_PLANES:
            raise ValueError(f"k_sim must be from 0 to {MOST_PLANES}, not {self.k_sim}")
        for name, purpose in (("r_reps", ""), ("d_proj", "project"), ("d_final", "shorten")):
            if (value := getattr(self, name)) is not None and value < 1:
                hint = f"; leave it out to {purpose} nothing" if purpose else ""
                raise ValueError(f"{name} must be at least 1, not {value}{hint}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2^64 - 1, not {self.seed}")
        if self.r_reps * (self.k_sim + (self.d_proj or 0)) > MOST_RANDOM:
            raise ValueError(
                f"r_reps times k_sim and d_proj together must be at most {MOST_RANDOM}; ask for less of one"
            )
        whole = self.whole_length(1)
        if whole > LONGEST:
            raise ValueError(
                f"k_sim, r_reps and d_proj make vectors of {whole} numbers, and at most {LONGEST} are made; "
                "ask for less of one of them"
            )

    def length(self, dim: int) -> int:
        """The length of an encoding of tokens with `dim` dimensions, which must fit the parameters."""
        if self.d_proj is not None and self.d_proj > dim:
            raise ValueError(f"d_proj is {self.d_proj}, but tokens have {dim} dimensions; ask for no more")
        whole = self.whole_length(dim)
        if whole > LONGEST:
            raise ValueError(
                f"vectors would have {whole} numbers, and at most {LONGEST} are made; give a smaller d_proj"
            )
        if self.d_final is not None and self.d_final > whole:
            raise ValueError(f"d_final is {self.d_final}, but vectors have {whole} numbers; ask for no more")
        return whole if self.d_final is None else self.d_final

    def encode(
        self,
        matrices: Sequence[Embedding],
        input_type: Literal["query", "document"],
        between: Callable[[], object] | None = None,
    ) -> NDArray[np.float32]:
        """Encodes token matrices as float32 [matrices, length]; a matrix without rows gives zeros.

        Each is [tokens, dim], in any form that `Engine.score` takes. `between` is called after every few
        matrices; its errors end the work. Raises ValueError for other shapes, or different dimensions."""
        if not matrices:
            raise ValueError("give at least one token matrix")
        if input_type not in ("query", "document"):
            raise ValueError(f"input_type must be query or document, not {input_type!r}")
        given = [matrix if isinstance(matrix, Vectors) else Vectors(matrix) for matrix in matrices]
        dim = int(given[0].values.shape[-1])
        length = self.length(dim)
        out = np.empty((len(given), length), dtype=np.float32)
        drawn = _drawn(self, dim)
        at_once = max(1, min(_TOGETHER, _NUMBERS_TOGETHER // self.whole_length(dim)))
        for part in runs(map(len, given), _ROWS_TOGETHER, at_once):
            if between is not None:
                between()
            together = [_rows(each, dim) for each in given[part]]
            encoded = self._encode(Ragged.from_items(together), drawn, input_type == "document")
            out[part] = encoded.numpy()
        return out

    def whole_length(self, dim: int) -> int:
        """The length of an encoding of tokens with `dim` dimensions before it is shortened."""
        return int(self.r_reps * 2**self.k_sim * (dim if self.d_proj is None else self.d_proj))

    def _encode(self, items: Ragged, drawn: "_Drawn", is_document: bool) -> torch.Tensor:
        """Items [tokens, dim] in float32 to vectors [items, length]."""
        rows, count = items.values, len(items)
        owner = torch.repeat_interleave(torch.arange(count), torch.from_numpy(np.diff(items.offsets)))
        exact, lengths = rows.double(), rows.norm(dim=1)
        values = 1 << torch.arange(self.k_sim)
        blocks = []
        for i, hyperplanes in enumerate(drawn.hyperplanes):
            bits = exact @ hyperplanes > 0  # [T, k_sim]
            # Numbered through the regions of all items.
            regions = owner * 2**self.k_sim + (bits * values).sum(dim=1)  # [T]
            projected = rows if drawn.projections is None else rows @ drawn.projections[i]  # [T, d_proj]
            made = projected.new_zeros(count * 2**self.k_sim, projected.shape[1])
            made.index_add_(0, regions, projected)
            if is_document:
                self._average(made, regions, projected, lengths)
            blocks.append(made.view(count, -1))
        vectors = torch.cat(blocks, dim=1) / self.r_reps**0.5
        return vectors if self.d_final is None else drawn.sketch(vectors, self.d_final)

    def _average(
        self, made: torch.Tensor, regions: torch.Tensor, projected: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Turns the sums `made` [regions, d_proj] into the documents' vectors. `regions` [T] are those of all
        tokens, `projected` [T, d_proj] the tokens, and `lengths` [T] their lengths before the projection."""
        counts = torch.bincount(regions, minlength=len(made))
        made /= counts.clamp(min=1)[:, None]
        nearest = self._nearest(regions, len(made))
        empty = torch.nonzero((counts == 0) & (nearest < len(regions)))[:, 0]
        made[empty] = projected[nearest[empty]]
        if self.full_length:
            wanted = lengths.new_zeros(len(made)).index_add_(0, regions, lengths) / counts.clamp(min=1)
            wanted[empty] = lengths[nearest[empty]]
            made *= (wanted / made.norm(dim=1).clamp(min=_SHORTEST))[:, None]

    def _nearest(self, regions: torch.Tensor, num_regions: int) -> torch.Tensor:
        """The index of each region's nearest token, the first whose region differs in the fewest bits; too
        large for items without tokens. [num_regions]"""
        index = torch.arange(len(regions))
        distance = torch.full((num_regions,), _NOWHERE).scatter_reduce_(0, regions, index, "amin")
        distance = distance.reshape(-1, 2**self.k_sim)
        region = torch.arange(2**self.k_sim)
        # Bit by bit: the nearest by the bits so far may lie in the region that differs in this bit.
        for bit in range(self.k_sim):
            distance = torch.minimum(distance, distance[:, region ^ (1 << bit)] + _A_BIT)
        distance = distance.reshape(-1)
        return torch.where(distance < _NOWHERE, distance % _A_BIT, _NOWHERE)


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """The random numbers: `hyperplanes` [dim, k_sim] in float64 and `projections` [dim, d_proj], if any, for
    each repetition; `target` in the shortened vector and `sign` of each number, if it is shortened."""

    hyperplanes: tuple[torch.Tensor, ...]
    projections: tuple[torch.Tensor, ...] | None
    target: torch.Tensor | None
    sign: torch.Tensor | None

    def sketch(self, vectors: torch.Tensor, length: int) -> torch.Tensor:
        assert self.target is not None
        assert self.sign is not None
        return torch.zeros(len(vectors), length, dtype=torch.float32).index_add_(
            1, self.target, vectors * self.sign
        )


@lru_cache(maxsize=4)
def _drawn(muvera: Muvera, dim: int) -> _Drawn:
    reps, hyperplanes_shape = muvera.r_reps, (muvera.r_reps, muvera.k_sim, dim)
    normal = normals(muvera.seed, _HYPERPLANES, reps * muvera.k_sim * dim).reshape(hyperplanes_shape)
    projections = target = sign = None
    if muvera.d_proj is not None:
        drawn = _signs(draws(muvera.seed, _PROJECTIONS, reps * muvera.d_proj * dim))
        scaled = drawn / np.float32(muvera.d_proj) ** np.float32(0.5)
        projections = _across(scaled.reshape(reps, muvera.d_proj, dim))
    if muvera.d_final is not None:
        whole = muvera.whole_length(dim)
        drawn_numbers = draws(muvera.seed, _SKETCH, whole)
        lower = drawn_numbers & np.uint64((1 << 63) - 1)
        target = torch.from_numpy((lower % np.uint64(muvera.d_final)).astype(np.int64))
        sign = torch.from_numpy(_signs(drawn_numbers))
    return _Drawn(_across(normal), projections, target, sign)


def _across(vectors: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """Vectors [r_reps, n, dim] as one matrix [dim, n] per repetition."""
    return tuple(torch.from_numpy(np.ascontiguousarray(each.T)) for each in vectors)


def _rows(given: Vectors, dim: int) -> torch.Tensor:
    if given.values.ndim == 2 and given.values.shape == (0, dim):
        return torch.zeros(0, dim, dtype=torch.float32)
    try:
        rows, scales = given.as_rows(dim)
    except ValueError as error:
        raise ValueError(f"a token matrix {error}") from None
    return rows.float() if scales is None else rows * scales[:, None]
