"""How vectors leave: in numbers of 32 bits down to one, as JSON, as base64, or as a file of safetensors."""

import base64
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

# binary: a bit a number, 1 for those above 0, eight in a byte, as signed bytes (128 less); ubinary: unsigned.
Numbers = Literal["float32", "float16", "bfloat16", "int8", "binary", "ubinary"]
NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
Array = NDArray[np.float32]

_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_INT8 = 127


class Encoded(msgspec.Struct, frozen=True):
    """One text's vectors as they are sent, [dim] or [tokens, dim]. Those in int8 are to be multiplied by
    `scales`, a number a vector."""

    data: Any
    scales: Any = msgspec.UNSET


def encoded(vectors: Array, numbers: Numbers, as_base64: bool) -> Encoded:
    """For JSON: nested lists, or base64 of the numbers' little-endian bytes in row order."""
    tensor, scales = _converted(vectors, numbers)
    numbers_of_each = msgspec.UNSET if scales is None else scales.tolist()
    if not as_base64:
        return Encoded(encode_rows(tensor), numbers_of_each)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Encoded(base64.b64encode(raw).decode("ascii"), numbers_of_each)


def written(entries: list[Any]) -> Any:
    """A part of an answer in JSON. Other threads have their turn between two such parts, and not while all of
    an answer is written; and Python's objects for all of it take several times more memory."""
    return msgspec.Raw(msgspec.json.encode(entries))


def encode_rows(rows: torch.Tensor | Array) -> msgspec.Raw:
    """A vector, or rows of them, in JSON. Python's lists of all numbers take several times more memory."""
    if rows.ndim == 1:
        return msgspec.Raw(msgspec.json.encode(rows.tolist()))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(row.tolist()) for row in rows) + b"]")


def file_of(matrices: Sequence[Array], numbers: Numbers, about: dict[str, str]) -> bytes:
    """All vectors in the format of safetensors: `embeddings` [sum of lengths, dim], `lengths` [texts], how
    many of them each text has, and `scales` where there are some; `about` becomes the file's metadata."""
    matrices = [np.atleast_2d(matrix) for matrix in matrices]
    tensor, scales = _converted(np.concatenate(matrices), numbers)
    tensors = {
        "embeddings": tensor.contiguous(),
        "lengths": torch.tensor([len(matrix) for matrix in matrices]),
    }
    if scales is not None:
        tensors["scales"] = torch.from_numpy(scales)
    return save(tensors, metadata=about)


def _converted(vectors: Array, numbers: Numbers) -> tuple[torch.Tensor, NDArray[np.float32] | None]:
    """The vectors in those numbers, and their scales where they have some."""
    if numbers == "int8":
        most = np.abs(vectors).max(axis=-1, initial=0)
        scales = np.where(most > 0, most / _MOST_INT8, 1).astype(np.float32)
        return torch.from_numpy(np.rint(vectors / scales[..., None]).astype(np.int8)), scales
    if numbers in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return torch.from_numpy(bits if numbers == "ubinary" else (bits ^ 0x80).view(np.int8)), None
    tensor = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    return tensor.to(_FLOATS.get(numbers, torch.float32)), None
