"""Fixed dimensional encodings: one vector of a token matrix, so that the inner product of two of them is
about MaxSim, and any store of vectors can do the first stage of late interaction.

Source: Dhulipala, Hadian, Jayaram, Lee & Mirrokni 2024, "MUVERA: Multi-Vector Retrieval via Fixed Dimensional
Encodings" (arXiv 2405.19504).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.vectors import Embedding, Vectors

_STEP = np.uint64(0x9E3779B97F4A7C15)
# Numbers from a normal distribution are multiples of its inverse, so that the last bits of a machine's
# logarithm and cosine change nothing.
_NORMAL_STEPS = 65_536


def draws(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """The first draws of a stream: integers from 0 to 2^64 - 1, [count]."""
    state = _draw(_draw(np.array([seed], dtype=np.uint64), 1) + np.uint64(stream), 1)
    return _draw(state, np.arange(1, count + 1, dtype=np.uint64))


def signs(seed: int, stream: int, count: int) -> NDArray[np.float32]:
    """1 where the highest bit of a draw is 0, else -1: float32 [count]."""
    return _signs(draws(seed, stream, count))


def signed_choices(
    seed: int, stream: int, count: int, num_choices: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Of each draw a number from 0 to `num_choices` - 1, its 63 lower bits modulo that, and a sign by its
    highest bit: int64 and float32, [count] each."""
    drawn = draws(seed, stream, count)
    lower = drawn & np.uint64((1 << 63) - 1)
    return (lower % np.uint64(num_choices)).astype(np.int64), _signs(drawn)


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
    return np.where(drawn >> np.uint64(63), -1, 1).astype(np.float32)


def _draw(state: NDArray[np.uint64], number: NDArray[np.uint64] | int) -> NDArray[np.uint64]:
    """Unsigned integers in arrays wrap around, as is meant."""
    mixed = state + np.asarray(number, dtype=np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


# Numbers of an encoding, hyperplanes of a repetition, and random vectors of all repetitions, at most: they
# take memory for each dimension of a token.
LONGEST, MOST_PLANES, MOST_RANDOM = 262_144, 12, 8_192
# Matrices are encoded together up to as many, as many rows, and as many numbers of their vectors.
_TOGETHER, _ROWS_TOGETHER, _NUMBERS_TOGETHER = 64, 16_384, 1 << 21
# Which random numbers are which.
_HYPERPLANES, _PROJECTIONS, _SKETCH = 0, 1, 2
# Farther than any token; a bit that differs counts more than any index of a token.
_NOWHERE, _A_BIT = 1 << 62, 1 << 32
# What is shorter is not made longer.
_SHORTEST = 1e-12


@dataclass(frozen=True, slots=True)
class Muvera:
    """How token matrices become vectors. Only vectors of the same parameters can be compared.

    In each of `r_reps` repetitions a token x falls into one of 2^`k_sim` regions: bit i of the region's
    number, of value 2^i, is 1 where <g_i, x> > 0, for normal random g_i (SimHash). It counts as S x /
    sqrt(`d_proj`), S of random signs [d_proj, dim]; with `d_proj` None as x itself. A query has in each
    region the sum of its tokens there; a document has their mean and, in a region without any, the token
    whose region differs in the fewest bits, the first of these. All regions of all repetitions end to end,
    divided by sqrt(r_reps), are the vector, of r_reps * 2^k_sim * d_proj numbers. With `d_final` it is
    shortened to as many by a count sketch: number j is added, with a random sign, to a random one of them.

    The mean of a document's tokens is shorter than they are, the more so the more they differ, while MaxSim
    takes one of them at its full length. With `full_length`, which the paper does not have, what a document
    has in a region is brought to the mean length that its tokens there have before they are projected.

    The random numbers come from streams of `seed` (`random_numbers.py`): g [r_reps, k_sim, dim] from stream
    0, S [r_reps, d_proj, dim] from stream 1, in row order, and the sketch from stream 2. Regions are computed
    in float64, all else in float32. Raises ValueError for parameters that make no sense."""

    k_sim: int = 3
    r_reps: int = 40
    d_proj: int | None = 32
    d_final: int | None = None
    full_length: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.k_sim <= MOST_PLANES:
            raise ValueError(f"k_sim must be from 0 to {MOST_PLANES}, not {self.k_sim}")
        if self.r_reps < 1:
            raise ValueError(f"r_reps must be at least 1, not {self.r_reps}")
        if self.d_proj is not None and self.d_proj < 1:
            raise ValueError(f"d_proj must be at least 1, not {self.d_proj}; leave it out to project nothing")
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
        if self.d_final is not None and self.d_final < 1:
            raise ValueError(
                f"d_final must be at least 1, not {self.d_final}; leave it out to shorten nothing"
            )

    def length(self, dim: int) -> int:
        """How many numbers the encoding of tokens of `dim` dimensions has. Raises ValueError where these do
        not go with the parameters."""
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
        between: Callable[[], object] = lambda: None,
    ) -> NDArray[np.float32]:
        """One vector a token matrix, float32 [matrices, length]; of a matrix without rows, zeros. `between`
        is called after every few matrices; an error that it raises ends the work.

        Each is [tokens, dim], in any form that `Engine.score` takes embeddings in. Raises ValueError for
        matrices of another shape, or of different dimensions."""
        if not matrices:
            raise ValueError("give at least one token matrix")
        if input_type not in ("query", "document"):
            raise ValueError(f"input_type must be query or document, not {input_type!r}")
        given = [matrix if isinstance(matrix, Vectors) else Vectors(matrix) for matrix in matrices]
        dim = int(given[0].values.shape[-1])
        length = self.length(dim)
        out = np.empty((len(given), length), dtype=np.float32)
        drawn = _drawn(self, dim)
        for part in _parts([len(each) for each in given], self.whole_length(dim)):
            between()
            together = [_rows(each, dim) for each in given[part]]
            encoded = self._encode(Ragged.from_items(together), drawn, input_type == "document")
            out[part] = encoded.numpy()
        return out

    def whole_length(self, dim: int) -> int:
        """How many numbers the encoding of tokens of `dim` dimensions has before it is shortened."""
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
            # Among the regions of all items.
            regions = owner * 2**self.k_sim + (bits * values).sum(dim=1)  # [T]
            projected = rows if drawn.projections is None else rows @ drawn.projections[i]  # [T, d_proj]
            made = torch.zeros(count * 2**self.k_sim, projected.shape[1]).index_add_(0, regions, projected)
            if is_document:
                self._average(made, regions, projected, lengths)
            blocks.append(made.view(count, -1))
        vectors = torch.cat(blocks, dim=1) / self.r_reps**0.5
        return vectors if self.d_final is None else drawn.sketch(vectors, self.d_final)

    def _average(
        self, made: torch.Tensor, regions: torch.Tensor, projected: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Makes of the sums `made` [regions, d_proj] what documents have in their regions: `regions` [T] are
        those of all tokens, which are `projected` [T, d_proj] and have had the `lengths` [T]."""
        counts = torch.bincount(regions, minlength=len(made))
        made /= counts.clamp(min=1)[:, None]
        nearest = self._nearest(regions, len(made))
        empty = torch.nonzero((counts == 0) & (nearest < len(regions)))[:, 0]
        made[empty] = projected[nearest[empty]]
        if self.full_length:
            wanted = torch.zeros(len(made)).index_add_(0, regions, lengths) / counts.clamp(min=1)
            wanted[empty] = lengths[nearest[empty]]
            made *= (wanted / made.norm(dim=1).clamp(min=_SHORTEST))[:, None]

    def _nearest(self, regions: torch.Tensor, num_regions: int) -> torch.Tensor:
        """For each region the token whose own differs from it in the fewest bits, the first of these, as its
        index; where the item has no tokens an index that is too large. [num_regions]"""
        index = torch.arange(len(regions))
        distance = torch.full((num_regions,), _NOWHERE).scatter_reduce_(0, regions, index, "amin")
        distance = distance.reshape(-1, 2**self.k_sim)
        region = torch.arange(2**self.k_sim)
        # Bit by bit: what is nearest in the bits so far is reached through the region that differs in this.
        for bit in range(self.k_sim):
            distance = torch.minimum(distance, distance[:, region ^ (1 << bit)] + _A_BIT)
        distance = distance.reshape(-1)
        return torch.where(distance < _NOWHERE, distance % _A_BIT, _NOWHERE)


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """The random numbers: of each repetition `hyperplanes` [dim, k_sim] in float64 and `projections`
    [dim, d_proj], None where tokens are not projected; and of each number of a whole vector its `target` in
    the shortened one and its `sign`, None where it is not shortened."""

    hyperplanes: tuple[torch.Tensor, ...]
    projections: tuple[torch.Tensor, ...] | None
    target: torch.Tensor | None
    sign: torch.Tensor | None

    def sketch(self, vectors: torch.Tensor, length: int) -> torch.Tensor:
        """Vectors [n, whole] shortened to [n, length]."""
        assert self.target is not None
        assert self.sign is not None
        return torch.zeros(len(vectors), length).index_add_(1, self.target, vectors * self.sign)


@lru_cache(maxsize=4)
def _drawn(muvera: Muvera, dim: int) -> _Drawn:
    reps, hyperplanes_shape = muvera.r_reps, (muvera.r_reps, muvera.k_sim, dim)
    normal = normals(muvera.seed, _HYPERPLANES, reps * muvera.k_sim * dim).reshape(hyperplanes_shape)
    projections = target = sign = None
    if muvera.d_proj is not None:
        drawn = signs(muvera.seed, _PROJECTIONS, reps * muvera.d_proj * dim)
        scaled = drawn / np.float32(muvera.d_proj) ** np.float32(0.5)
        projections = _across(scaled.reshape(reps, muvera.d_proj, dim))
    if muvera.d_final is not None:
        whole = muvera.whole_length(dim)
        target, sign = map(torch.from_numpy, signed_choices(muvera.seed, _SKETCH, whole, muvera.d_final))
    return _Drawn(_across(normal), projections, target, sign)


def _across(vectors: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """Vectors [r_reps, n, dim] as a matrix [dim, n] for each repetition."""
    return tuple(torch.from_numpy(np.ascontiguousarray(each.T)) for each in vectors)


def _rows(given: Vectors, dim: int) -> torch.Tensor:
    """The rows of a matrix in float32."""
    if given.values.ndim == 2 and given.values.shape == (0, dim):
        return torch.zeros(0, dim)
    try:
        rows, scales = given.as_rows(dim)
    except ValueError as error:
        raise ValueError(f"a token matrix {error}") from None
    return rows.float() if scales is None else rows * scales[:, None]


def _parts(lengths: Sequence[int], numbers: int) -> Iterator[slice]:
    """Runs of matrices that are encoded together, of which each gives a vector of so many `numbers`."""
    first = rows = 0
    most = max(1, min(_TOGETHER, _NUMBERS_TOGETHER // numbers))
    for i, length in enumerate(lengths):
        if i > first and (i - first == most or rows + length > _ROWS_TOGETHER):
            yield slice(first, i)
            first, rows = i, 0
        rows += length
    yield slice(first, len(lengths))
