"""Vectors in all kinds of numbers: what is sent is what a client reads, as near as its numbers allow."""

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from maxsimd.api.handlers.embeddings import NUMBERS, Numbers, encode_vectors, file_of

TYPES: dict[str, Any] = {
    "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "i1", "binary": "i1", "ubinary": "u1",
}  # fmt: skip
# How much of the largest number in a vector each of its numbers may be off.
ERRORS = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.5 / 127 + 1e-6}


def vectors(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def read(numbers: Numbers, data: Any, scale: Any) -> Any:
    if numbers in ("binary", "ubinary"):
        bits = np.asarray(data).astype(np.int16) + (128 if numbers == "binary" else 0)
        return np.unpackbits(bits.astype(np.uint8), axis=-1)
    if numbers == "bfloat16" and np.asarray(data).dtype == np.uint16:
        data = (np.asarray(data).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(data, dtype=np.float32) * (np.asarray(scale)[..., None] if numbers == "int8" else 1)


def check(numbers: Numbers, found: Any, made: Any) -> None:
    if numbers in ("binary", "ubinary"):
        np.testing.assert_array_equal(found[..., : made.shape[-1]], made > 0)
        return
    assert (np.abs(found - made) <= ERRORS[numbers] * np.abs(made).max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", [(1,), (13,), (40, 128)])
def test_lists_and_base64_hold_the_same_numbers(numbers: Numbers, shape: tuple[int, ...]) -> None:
    made = vectors(*shape)
    as_list = encode_vectors(made, numbers, as_base64=False)
    packed = encode_vectors(made, numbers, as_base64=True)
    raw = np.frombuffer(base64.b64decode(packed.data), dtype=TYPES[numbers])
    raw = raw.reshape(*shape[:-1], -1)
    check(numbers, read(numbers, msgspec.json.decode(as_list.data), as_list.scales), made)
    check(numbers, read(numbers, raw, packed.scales), made)


def test_a_vector_of_zeros_stays_one() -> None:
    for numbers in ("float32", "float16", "bfloat16", "int8"):
        sent = encode_vectors(np.zeros((2, 5), dtype=np.float32), numbers, as_base64=False)
        assert msgspec.json.decode(sent.data) == [[0] * 5] * 2


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_file_holds_all_texts_end_to_end(numbers: Numbers, tmp_path: Any) -> None:
    texts = [vectors(7, 24), vectors(24), vectors(30, 24)]
    path = tmp_path / "answer.safetensors"
    path.write_bytes(file_of(texts, numbers, {"model": "mine"}))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"model": "mine"}
    tensors = load(path.read_bytes())
    assert tensors["lengths"].tolist() == [7, 1, 30]
    held = tensors["embeddings"]
    scales = tensors["scales"].numpy() if numbers == "int8" else None
    numpy = held.float().numpy() if held.dtype == torch.bfloat16 else held.numpy()
    check(numbers, read(numbers, numpy, scales), np.concatenate([np.atleast_2d(text) for text in texts]))
