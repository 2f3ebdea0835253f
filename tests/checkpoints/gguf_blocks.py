"""Blocks of 256 values, as ggml-common.h and ggml-quants.c define them: written, because the package gguf
only reads them, and read one value at a time."""

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind

SUPER = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
_BITS = {Kind.Q4_K: 4, Kind.Q5_K: 5}


def pack(values: Any, kind: Kind) -> Any:
    """Rows of float32 [n, 256 * m] as the bytes of blocks [n, bytes]."""
    blocks = np.asarray(values, dtype=np.float32).reshape(-1, 256)
    packed = _signed(blocks) if kind is Kind.Q6_K else _shifted(blocks, _BITS[kind])
    return packed.reshape(len(values), -1)


def unpack_plainly(row: Any, kind: Kind) -> list[float]:
    """The values of a row of bytes, each by itself."""
    return _read_signed(bytes(row)) if kind is Kind.Q6_K else _read_shifted(bytes(row), _BITS[kind])


def _shifted(blocks: Any, bits: int) -> Any:
    """Eight groups of 32, each of which has a scale and a smallest value of six bits."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - low) / (2**bits - 1)
    d = (scale.max(-1, keepdims=True) / 63).astype(np.float16)
    dmin = ((-low).max(-1, keepdims=True) / 63).astype(np.float16)
    scales = np.rint(scale / np.maximum(d.astype(np.float32), 1e-12)).clip(0, 63).astype(np.uint8)
    mins = np.rint(-low / np.maximum(dmin.astype(np.float32), 1e-12)).clip(0, 63).astype(np.uint8)
    step = np.maximum(d.astype(np.float32) * scales, 1e-12)[..., None]
    shift = (dmin.astype(np.float32) * mins)[..., None]
    q = np.rint((groups + shift) / step).clip(0, 2**bits - 1).astype(np.uint8)
    packed_scales = np.zeros((len(blocks), 12), np.uint8)
    for j in range(4):
        packed_scales[:, j] = scales[:, j] | (scales[:, j + 4] >> 4) << 6
        packed_scales[:, j + 4] = mins[:, j] | (mins[:, j + 4] >> 4) << 6
        packed_scales[:, j + 8] = (scales[:, j + 4] & 15) | (mins[:, j + 4] & 15) << 4
    low_bits = [(q[:, 2 * j] & 15) | (q[:, 2 * j + 1] & 15) << 4 for j in range(4)]
    parts = [d.view(np.uint8), dmin.view(np.uint8), packed_scales]
    if bits == 5:
        high = sum((q[:, j] >> 4) << j for j in range(8)).astype(np.uint8)
        parts.append(high)
    return np.concatenate([*parts, *low_bits], axis=-1)


def _signed(blocks: Any) -> Any:
    """Sixteen groups of 16, each of which has a scale of eight bits."""
    groups = blocks.reshape(-1, 16, 16)
    scale = np.abs(groups).max(-1) / 31
    d = (scale.max(-1, keepdims=True) / 127).astype(np.float16)
    scales = np.rint(scale / np.maximum(d.astype(np.float32), 1e-12)).clip(0, 127).astype(np.int8)
    step = np.maximum(d.astype(np.float32) * scales, 1e-12)[..., None]
    q = (np.rint(groups / step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([(q[:, :, 0] & 15) | (q[:, :, 2] & 15) << 4,
                          (q[:, :, 1] & 15) | (q[:, :, 3] & 15) << 4], axis=-1)  # fmt: skip
    high = sum((q[:, :, j] >> 4) << (2 * j) for j in range(4)).astype(np.uint8)
    parts = [low.reshape(len(blocks), -1), high.reshape(len(blocks), -1), scales.view(np.uint8)]
    return np.concatenate([*parts, d.view(np.uint8)], axis=-1)


def _half(two: bytes) -> float:
    return float(np.frombuffer(two, np.float16)[0])


def _read_shifted(row: bytes, bits: int) -> list[float]:
    size = 144 if bits == 4 else 176
    values = []
    for start in range(0, len(row), size):
        block = row[start : start + size]
        d, dmin, scales = _half(block[:2]), _half(block[2:4]), block[4:16]
        high, low = (block[16:48], block[48:]) if bits == 5 else (bytes(32), block[16:])
        for i in range(256):
            j, at = i // 32, i % 32
            if j < 4:
                scale, least = scales[j] & 63, scales[j + 4] & 63
            else:
                scale = (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4
                least = (scales[j + 4] >> 4) | (scales[j] >> 6) << 4
            byte = low[(j // 2) * 32 + at]
            q = (byte >> 4 if j % 2 else byte & 15) + 16 * (high[at] >> j & 1)
            values.append(d * scale * q - dmin * least)
    return values


def _read_signed(row: bytes) -> list[float]:
    values = []
    for start in range(0, len(row), 210):
        block = row[start : start + 210]
        d = _half(block[208:])
        scales = np.frombuffer(block[192:208], np.int8)
        for i in range(256):
            half, quarter, at = i // 128, i % 128 // 32, i % 32
            byte = block[half * 64 + (quarter % 2) * 32 + at]
            low = byte >> 4 if quarter > 1 else byte & 15
            high = block[128 + half * 32 + at] >> 2 * quarter & 3
            values.append(d * int(scales[i // 16]) * ((low | high << 4) - 32))
    return values
