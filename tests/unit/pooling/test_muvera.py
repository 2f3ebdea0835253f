"""Fixed dimensional encodings and their random numbers against the paper's text, in loops."""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from maxsimd.engine import Muvera, Vectors
from maxsimd.pooling import muvera as module

_ALL = (1 << 64) - 1
InputType = Literal["query", "document"]
INPUT_TYPES: tuple[InputType, ...] = ("query", "document")


def splitmix(state: int, number: int) -> int:
    mixed = (state + number * 0x9E3779B97F4A7C15) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
    return mixed ^ (mixed >> 31)


def stream(seed: int, number: int, count: int) -> list[int]:
    state = splitmix((splitmix(seed, 1) + number) & _ALL, 1)
    return [splitmix(state, n) for n in range(1, count + 1)]


def plain_normals(seed: int, number: int, count: int) -> list[float]:
    drawn = stream(seed, number, count + 1)
    made: list[float] = []
    for first, second in zip(drawn[::2], drawn[1::2], strict=False):
        radius = math.sqrt(-2 * math.log(((first >> 11) + 1) / 2**53))
        angle = 2 * math.pi * (second >> 11) / 2**53
        made += [round(radius * part * 65536) / 65536 for part in (math.cos(angle), math.sin(angle))]
    return made[:count]


def plain(encoding: Muvera, tokens: NDArray[Any], input_type: InputType) -> NDArray[Any]:
    """The vector of one token matrix [tokens, dim], as the paper's section 2 has it, in loops."""
    dim, k, reps = tokens.shape[1], encoding.k_sim, encoding.r_reps
    width = dim if encoding.d_proj is None else encoding.d_proj
    planes = np.array(plain_normals(encoding.seed, 0, reps * k * dim)).reshape(reps, k, dim)
    if encoding.d_proj is not None:
        signs = [-1 if each >> 63 else 1 for each in stream(encoding.seed, 1, reps * width * dim)]
        random_signs = np.array(signs).reshape(reps, width, dim)
    blocks: list[NDArray[Any]] = []
    for rep in range(reps):
        regions = [sum(int(p @ token > 0) << bit for bit, p in enumerate(planes[rep])) for token in tokens]
        projected = [
            token if encoding.d_proj is None else random_signs[rep] @ token / math.sqrt(width)
            for token in tokens
        ]
        for region in range(2**k):
            here = [i for i, of_token in enumerate(regions) if of_token == region]
            block = sum((projected[i] for i in here), np.zeros(width))
            if input_type == "document" and len(tokens):
                if not here:
                    here = [min(range(len(tokens)), key=lambda i: ((regions[i] ^ region).bit_count(), i))]
                block = np.mean([projected[i] for i in here], axis=0)
                if encoding.full_length:
                    length = np.linalg.norm(block)
                    wanted = np.mean([np.linalg.norm(tokens[i]) for i in here])
                    block = block * wanted / length if length > 1e-12 else block
            blocks.append(block)
    vector = np.concatenate(blocks) / math.sqrt(reps)
    if encoding.d_final is None:
        return vector
    shortened = np.zeros(encoding.d_final)
    for number, drawn in zip(vector, stream(encoding.seed, 2, len(vector)), strict=True):
        shortened[(drawn & ((1 << 63) - 1)) % encoding.d_final] += -number if drawn >> 63 else number
    return shortened


@st.composite
def encodings(draw: st.DrawFn) -> Muvera:
    k_sim, r_reps = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    d_proj = draw(st.none() | st.integers(1, 6))
    d_final = draw(st.none() | st.integers(1, min(6, r_reps * 2**k_sim * (d_proj or 6))))
    full_length, seed = draw(st.booleans()), draw(st.integers(0, _ALL))
    return Muvera(k_sim, r_reps, d_proj, d_final, full_length=full_length, seed=seed)


@settings(max_examples=30)
@given(encodings(), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_encodings_are_the_papers(encoding: Muvera, lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    matrices = [random.standard_normal((length, 6)).astype(np.float32) for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOGETHER", 3)  # so that these few are not all encoded together
        for input_type in INPUT_TYPES:
            found = encoding.encode(matrices, input_type)
            expected = [plain(encoding, matrix, input_type) for matrix in matrices]
            np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
            assert found.shape == (len(matrices), encoding.length(6))


def test_what_is_called_between_matrices_may_end_the_work() -> None:
    matrices = [np.ones((2, 384), dtype=np.float32)] * 100
    calls: list[None] = []

    def end() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise InterruptedError

    # Vectors that are so long are made a few at a time.
    with pytest.raises(InterruptedError):
        Muvera(k_sim=12, r_reps=64, d_proj=1).encode(matrices[:40], "query", end)
    assert len(calls) == 3
    Muvera().encode(matrices, "query", lambda: calls.append(None))
    assert len(calls) == 5


def test_matrices_come_in_all_forms_of_embeddings() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    encoding = Muvera()
    expected = encoding.encode([rows], "document")
    for given_rows in (torch.from_numpy(rows), rows.astype(np.float64), Vectors(rows)):
        np.testing.assert_allclose(encoding.encode([given_rows], "document"), expected, atol=1e-5)
    scales = np.abs(rows).max(axis=1) / 127
    quantised = Vectors(np.rint(rows / scales[:, None]).astype(np.int8), scales)
    cosine = (encoding.encode([quantised], "document")[0] @ expected[0]) / (expected**2).sum()
    assert cosine == pytest.approx(1, abs=0.1)
    assert expected.shape == (1, 10_240)


def test_parameters_that_make_no_sense_are_refused() -> None:
    wrongs: tuple[dict[str, Any], ...] = (
        *({"k_sim": -1}, {"k_sim": 13}, {"r_reps": 0}, {"d_proj": 0}, {"d_final": 0}),
        *({"seed": -1}, {"seed": 1 << 64}, {"r_reps": 8_193}, {"k_sim": 12, "r_reps": 100}),
        {"k_sim": 0, "r_reps": 200, "d_proj": 41},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="|".join(wrong)):
            Muvera(**wrong)
    rows = np.ones((2, 8), dtype=np.float32)
    unsaid: Any = "passage"
    for encoding, matrices, input_type, said in (
        (Muvera(d_proj=9), [rows], "query", "d_proj is 9"),
        (Muvera(d_proj=8, d_final=100_000), [rows], "query", "d_final is 100000"),
        (Muvera(k_sim=10, r_reps=200, d_proj=None), [rows], "query", "smaller d_proj"),
        (Muvera(d_proj=8), [rows, rows[:, :7]], "query", "a token matrix has the shape"),
        (Muvera(), [], "query", "at least one"),
        (Muvera(d_proj=8), [rows], unsaid, "query or document"),
    ):
        with pytest.raises(ValueError, match=said):
            encoding.encode(matrices, input_type)
