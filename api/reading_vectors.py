"""Embeddings in requests: of queries and documents in place of their texts."""

import binascii
import math
from collections.abc import Iterator
from typing import Any

import torch

from maxsimd.engine import InvalidRequestError, Vectors
from maxsimd.engine.workers import yield_to_smaller

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
# Lists and base64 become numbers in parts of so many numbers or characters: each part holds Python's lock. A
# multiple of the four characters that base64 has for three bytes.
_PART = 1 << 18
_LONGEST_SHOWN = 60


def is_vectors(content: Any) -> bool:
    """Whether a content is an embedding: an object with one, and without a text, which would come first."""
    return isinstance(content, dict) and "embedding" in content and not content.keys() & {"text", "content"}


def vectors_of(content: dict[str, Any], where: str, param: str) -> Vectors:
    """The embedding of an object {"embedding", "dtype", "shape", "scales"}: lists of numbers, or base64 of
    little-endian numbers in row order. Raises InvalidRequestError, which calls the object `where`."""
    try:
        given, shape = content["embedding"], content.get("shape")
        dtype = _dtype_of(content.get("dtype") or "float32")
        rows = _numbers(given, dtype, "embedding")
        if shape is not None:
            rows = rows.reshape(_sizes_of(shape, rows.numel()))
        scales = content.get("scales")
        if scales is not None:
            scales = _numbers(scales, torch.float32, "scales")
    except ValueError as error:
        raise InvalidRequestError(f"{where}: {error}", param) from None
    return Vectors(rows, scales)


def _dtype_of(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        shown = repr(name[:_LONGEST_SHOWN]) if isinstance(name, str) else f"of type {type(name).__name__}"
        raise ValueError(f"dtype {shown} is not known; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _numbers(given: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    return _from_base64(given, dtype, name) if isinstance(given, str) else _from_lists(given, dtype, name)


def _from_base64(text: str, dtype: torch.dtype, name: str) -> torch.Tensor:
    raw = bytearray()
    try:
        for start in range(0, len(text), _PART):
            part = text[start : start + _PART]
            if part.endswith("=") and start + _PART < len(text):
                raise ValueError("padding before the end")
            raw += binascii.a2b_base64(part, strict_mode=True)
            yield_to_smaller()
    except ValueError:
        raise ValueError(f"{name} is not base64; leave out line breaks and data: prefixes") from None
    if not raw or len(raw) % dtype.itemsize:
        raise ValueError(f"{name} has {len(raw)} bytes, and its numbers have {dtype.itemsize} each")
    return torch.frombuffer(raw, dtype=dtype)


def _from_lists(values: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    try:
        if not isinstance(values, list):
            return torch.tensor(values, dtype=dtype)
        return torch.cat([torch.tensor(part, dtype=dtype) for part in _parts_of(values)])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{name} is neither base64 nor lists of numbers, as many in each, in the range of {dtype}"
        ) from None


def _parts_of(values: list[Any]) -> Iterator[list[Any]]:
    """Parts of a list of numbers, or of lists of numbers."""
    numbers_each = max(1, len(values[0])) if values and isinstance(values[0], list) else 1
    count = max(1, _PART // numbers_each)
    for start in range(0, max(1, len(values)), count):
        yield values[start : start + count]
        yield_to_smaller()


def _sizes_of(shape: Any, count: int) -> list[int]:
    """The one or two sizes of a shape. They are bounded before they are multiplied: a product of thousands
    of long numbers takes minutes."""
    sizes = shape if isinstance(shape, list) else [shape]
    if len(sizes) not in (1, 2):
        raise ValueError(f"shape has {len(sizes)} sizes; give [tokens, dimensions] or [dimensions]")
    if not all(type(size) is int for size in sizes):
        raise ValueError(
            "shape does not fit: it has something else than whole numbers; give [tokens, dimensions]"
        )
    if not all(0 <= size <= count for size in sizes) or math.prod(sizes) != count:
        raise ValueError(f"shape {shape} does not fit the embedding, which has {count} numbers")
    return sizes
