"""The instructions that unpack int8 numbers, which the interpreter leaves out, on every number there is."""

import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from maxsimd.engine.ops.triton import maxsim_int8

Words = NDArray[np.uint32]


def run(assembly: str, first: Words, second: Words, dtype: torch.dtype) -> list[Words]:
    """What PTX of a few instructions returns, by their definitions in its manual."""
    registers = {"$4": first, "$5": second}
    for line in re.findall(r"[^{};]+", assembly):
        name, *operands = re.split(r"[ ,]+", line.strip())
        if not name or name.startswith(".reg"):
            continue
        out, *given = operands
        values = [
            registers[each] if each in registers else np.full_like(first, int(each, 16)) for each in given
        ]
        registers[out] = INSTRUCTIONS[name](values, dtype)
    return [registers[f"${i}"] for i in range(4)]


def _permuted(values: list[Words], dtype: torch.dtype) -> Words:
    first, second, selector = values
    both = np.concatenate([first[:, None], second[:, None]], axis=1).view(np.uint8)  # [n, 8]
    digits = [(int(selector[0]) >> (4 * i)) & 0xF for i in range(4)]
    assert max(digits) < 8
    return np.ascontiguousarray(both[:, digits]).view(np.uint32)[:, 0]


def _combined(values: list[Words], dtype: torch.dtype) -> Words:
    a, b, c, table = values
    result = np.zeros_like(a)
    for i in range(8):
        if (int(table[0]) >> i) & 1:
            of_a, of_b, of_c = a if i & 4 else ~a, b if i & 2 else ~b, c if i & 1 else ~c
            result |= of_a & of_b & of_c
    return result


def _halves(words: Words, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype).double()


def _words(numbers: torch.Tensor, dtype: torch.dtype) -> Words:
    assert torch.equal(numbers.to(dtype).double(), numbers), "nothing is rounded"
    return numbers.to(dtype).view(torch.int16).numpy().view(np.uint32)


def _multiplied_and_added(values: list[Words], dtype: torch.dtype) -> Words:
    a, b, c = (_halves(each, dtype) for each in values)
    return _words(a * b + c, dtype)


def _subtracted(values: list[Words], dtype: torch.dtype) -> Words:
    a, b = (_halves(each, dtype) for each in values)
    return _words(a - b, dtype)


INSTRUCTIONS = {
    "mov.b32": lambda values, dtype: values[0],
    "prmt.b32": _permuted,
    "lop3.b32": _combined,
    "fma.rn.bf16x2": _multiplied_and_added,
    "sub.f16x2": _subtracted,
}


@pytest.mark.parametrize(
    ("assembly", "dtype"),
    [(maxsim_int8._TO_BFLOAT16, torch.bfloat16), (maxsim_int8._TO_FLOAT16, torch.float16)],
    ids=["bfloat16", "float16"],
)
def test_every_int8_number_is_unpacked_exactly(assembly: object, dtype: torch.dtype) -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(-128, 128).repeat(8)).astype(np.int8)
    first, second = numbers.reshape(2, -1, 4)
    of_words = [np.ascontiguousarray(each).view(np.uint32)[:, 0] for each in (first, second)]
    found = run(assembly.value, *of_words, dtype)  # type: ignore[attr-defined]
    for i, words in enumerate(found):
        pairs = _halves(words, dtype).reshape(-1, 2)
        assert pairs[:, 0].tolist() == first[:, i].tolist()
        assert pairs[:, 1].tolist() == second[:, i].tolist()
