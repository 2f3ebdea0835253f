"""MaxSim by our kernel, by plain torch, and by other packages, each called in the way that is fastest for
it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from maxsimd.bench.gpu.shapes import MaxSimShape
from maxsimd.bench.timing import Run
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.pooling.ragged import Ragged

OURS = "maxsimd"
_EMPTY_SCORE = -1e9


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A query, bfloat16 [tokens, dim], and documents of `lengths` tokens end to end: unit vectors `rows`
    bfloat16 [tokens, dim]; or int8, each row with a scale, float32 [tokens].

    Indices are on the device already, for all contenders."""

    query: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor | None
    lengths: tuple[int, ...]
    offsets: torch.Tensor  # int32 [documents + 1]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def nbytes(self) -> int:
        """What has to be read of the documents."""
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dense(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [tokens, ...] of documents that are equally long, as [documents, length, ...]."""
        return values.view(len(self.lengths), self.longest, *values.shape[1:])

    def rounded(self) -> "Scored":
        """The same with documents in int8."""
        scales = self.rows.float().abs().amax(dim=1) / 127
        rows = (self.rows.float() / scales[:, None]).round().to(torch.int8)
        return Scored(self.query, rows, scales, self.lengths, self.offsets)

    def exact(self, documents: int) -> torch.Tensor:
        """The scores of the first documents by definition, in float32."""
        count = min(documents, len(self.lengths))
        rows = self.rows[: sum(self.lengths[:count])].float()
        if self.scales is not None:
            rows = rows * self.scales[: len(rows), None]
        queries = Ragged(self.query.float(), (0, len(self.query)))
        pairs = np.array([(0, document) for document in range(count)])
        return maxsim_reference(queries, Ragged.from_lengths(rows, self.lengths[:count]), pairs)


# Prepares what is called, which returns the scores [documents] or [1, documents].
Contender = Callable[[Scored], Run]


def draw(shape: MaxSimShape, device: torch.device, seed: int) -> Scored:
    """Random data of a shape."""
    low, high = shape.tokens
    lengths = np.random.default_rng(0).integers(low, high + 1, shape.documents).tolist()
    random = torch.Generator(device).manual_seed(seed)
    query, rows = (
        torch.nn.functional.normalize(
            torch.randn(count, shape.dim, device=device, generator=random), dim=-1
        ).bfloat16()
        for count in (shape.query, sum(lengths))
    )
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Scored(query, rows, None, tuple(lengths), offsets)


def contenders(shape: MaxSimShape, device: torch.device) -> dict[str, Contender]:
    """What scores documents in 16 bits here."""
    found: dict[str, Contender] = {"padded torch": _padded}
    if triton_ops.runs_on(device):
        found[OURS] = _ours
    is_dense = shape.tokens[0] == shape.tokens[1]
    if device.type != "cuda":
        return found
    if package("flash_maxsim") is not None:
        found["flash-maxsim"] = _flash_dense if is_dense else _flash_packed
    if package("late_interaction_kernels") is not None:
        found["late-interaction-kernels"] = _late_dense if is_dense else _late_packed
    return found


def rounded_contenders(shape: MaxSimShape, device: torch.device) -> dict[str, Contender]:
    """What scores documents in int8 here, with a query in 16 bits unless its name says otherwise."""
    found: dict[str, Contender] = {"padded torch": _padded}
    if triton_ops.runs_on(device):
        found[OURS] = _ours
    is_dense = shape.tokens[0] == shape.tokens[1]
    if device.type == "cuda" and is_dense and package("flash_maxsim") is not None:
        found["flash-maxsim"] = _flash_int8
        found["flash-maxsim, query in int8"] = _flash_int8_by_int8
    return found


def package(name: str) -> Any:
    """A package, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _ours(scored: Scored) -> Run:
    from maxsimd.engine.ops.triton.maxsim import Pairs, maxsim
    from maxsimd.engine.ops.triton.maxsim_tiles import PairGroup

    of_query = torch.tensor([0, len(scored.query)], dtype=torch.int32, device=scored.rows.device)
    of_documents = torch.stack([scored.offsets[:-1], scored.offsets[1:]], dim=1)
    bounds = torch.cat([of_query.expand_as(of_documents), of_documents], dim=1)
    pairs = Pairs(bounds, (PairGroup(len(bounds), len(scored.query)),), scored.longest)
    return lambda: maxsim(scored.query, scored.rows, pairs, _EMPTY_SCORE, scales=scored.scales)


def _padded(scored: Scored) -> Run:
    query = scored.query
    lengths = torch.tensor(scored.lengths, device=query.device)
    hidden = torch.arange(scored.longest, device=query.device)[None] >= lengths[:, None]
    padded = _pad(scored.rows, scored.lengths)  # [documents, longest, dim]
    scales = None if scored.scales is None else _pad(scored.scales[:, None], scored.lengths)

    def run() -> torch.Tensor:
        similarity = padded.to(query.dtype) @ query.T  # [documents, longest, query]
        if scales is not None:
            similarity = similarity * scales
        return similarity.masked_fill_(hidden[:, :, None], -torch.inf).amax(dim=1).float().sum(dim=1)

    return run


def _pad(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(list(lengths))), batch_first=True)


def _flash_dense(scored: Scored) -> Run:
    flash = package("flash_maxsim")
    query, documents = scored.query.half(), scored.dense(scored.rows.half())
    return lambda: flash.flash_maxsim(query, documents)


def _flash_packed(scored: Scored) -> Run:
    flash = package("flash_maxsim")
    # In any other precision it would convert all documents at each call.
    query, rows = scored.query.half(), scored.rows.half()
    return lambda: flash.flash_maxsim_packed(query, rows, scored.offsets, scored.longest)


def _flash_int8(scored: Scored) -> Run:
    flash = package("flash_maxsim")
    assert scored.scales is not None
    query, documents = scored.query.half(), scored.dense(scored.rows)
    scales = scored.dense(scored.scales.half())
    return lambda: flash.flash_maxsim_int8_symmetric(query, documents, scales)


def _flash_int8_by_int8(scored: Scored) -> Run:
    flash = package("flash_maxsim")
    assert scored.scales is not None
    documents, scales = scored.dense(scored.rows), scored.dense(scored.scales.half())
    query, query_scales = flash.quantize_query_int8(scored.query)
    return lambda: flash.flash_maxsim_int8x8(scored.query, documents, scales, query, query_scales)


def _late_dense(scored: Scored) -> Run:
    late = package("late_interaction_kernels")
    query, documents = scored.query[None], scored.dense(scored.rows)
    return lambda: late.maxsim(query, documents)


def _late_packed(scored: Scored) -> Run:
    late = package("late_interaction_kernels")
    of_query = torch.tensor([0, len(scored.query)], dtype=torch.int32, device=scored.rows.device)
    return lambda: late.maxsim_varlen(
        scored.query, scored.rows, of_query, scored.offsets, len(scored.query), scored.longest
    )
