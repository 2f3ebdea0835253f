"""The file itself: its metadata, of which nothing about the model may be left unread, and its tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from maxsimd.engine.errors import ModelLoadError

# The kinds of blocks that tests prove to be read as llama.cpp's own definition has them.
PROVEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


class GgufFile:
    """A file that is open for reading. Raises ModelLoadError where the package gguf is missing, and for a
    file that is none, or one of several parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
        except ImportError as error:
            raise ModelLoadError(
                f"{path} is a GGUF file, for which the package gguf is needed: pip install 'maxsimd[gguf]'"
            ) from error
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:
            raise ModelLoadError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._unread = set(self._reader.fields)
        if int(self.get("split.count") or 1) > 1:
            raise ModelLoadError(f"{path} is one part of several; join them with llama-gguf-split --merge")

    def get(self, key: str) -> Any:
        """A value of the metadata, None where there is none."""
        self._unread.discard(key)
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.get("general.architecture"))

    def setting(self, key: str) -> Any:
        """A value about the architecture, None where there is none."""
        return self.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> Any:
        """A number about the architecture. Raises ModelLoadError where there is none, or one a layer."""
        value = self.setting(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self.path} has no number {self.architecture}.{key}, but {value!r}")
        return value

    def refuse_unread(self) -> None:
        """Raises ModelLoadError if a value about the architecture has not been asked for: it might change
        what the model computes."""
        unread = sorted(key for key in self._unread if key.startswith(f"{self.architecture}."))
        if unread:
            raise ModelLoadError(f"{self.path} sets {', '.join(unread)}, which is not carried out here")

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its name, in torch's order."""
        return {
            tensor.name: tuple(int(size) for size in reversed(tensor.shape))
            for tensor in self._reader.tensors
        }

    @property
    def form(self) -> str:
        """How the tensors are stored."""
        kinds = sorted({tensor.tensor_type.name for tensor in self._reader.tensors})
        return f"GGUF: {', '.join(kinds)}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor by its name, dequantised to float32. Raises ModelLoadError for a kind of blocks that
        is not proven."""
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            kind = tensor.tensor_type
            if kind.name not in PROVEN:
                raise ModelLoadError(
                    f"{self.path} stores {tensor.name} as {kind.name}; name a version whose weights are "
                    + ", ".join(PROVEN)
                )
            shape = tuple(int(size) for size in reversed(tensor.shape))
            values = torch.from_numpy(dequantize(tensor.data, kind).astype("float32"))
            yield tensor.name, values.reshape(shape)
