"""Embeddings in requests: of queries and documents in place of their texts."""

import binascii
import math
from typing import Any

import torch

from maxsimd.engine import InvalidRequestError, Vectors

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


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
        raise ValueError(f"dtype {name!r} is not known; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _numbers(given: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    return _from_base64(given, dtype, name) if isinstance(given, str) else _from_lists(given, dtype, name)


def _from_base64(text: str, dtype: torch.dtype, name: str) -> torch.Tensor:
    try:
        raw = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise ValueError(f"{name} is not base64; leave out line breaks and data: prefixes") from None
    if not raw or len(raw) % dtype.itemsize:
        raise ValueError(f"{name} has {len(raw)} bytes, and its numbers have {dtype.itemsize} each")
    return torch.frombuffer(bytearray(raw), dtype=dtype)


def _from_lists(values: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    try:
        return torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{name} is neither base64 nor lists of numbers, as many in each, in the range of {dtype}"
        ) from None


def _sizes_of(shape: Any, count: int) -> list[int]:
    """The one or two sizes of a shape. They are bounded before they are multiplied: a product of thousands
    of long numbers takes minutes."""
    sizes = shape if isinstance(shape, list) else [shape]
    if len(sizes) not in (1, 2):
        raise ValueError(f"shape has {len(sizes)} sizes; give [tokens, dimensions] or [dimensions]")
    if not all(type(size) is int and 0 <= size <= count for size in sizes) or math.prod(sizes) != count:
        raise ValueError(f"shape {shape} does not fit the embedding, which has {count} numbers")
    return sizes
