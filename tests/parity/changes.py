"""Changes to copies of checkpoints, and the message where one is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model

CPU = torch.device("cpu")
Build = Callable[[Path], str]
Edit = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


def settings(file: str = "config.json", **values: Any) -> Edit:
    """Sets keys of a file of JSON, at the root or in the first module's folder. `file` may be a pattern."""

    def edit(folder: Path) -> None:
        path = next(iter([*folder.glob(file), *folder.glob(f"0_*/{file}")]))
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


OF_TEXTS, OF_ALL = "sentence_bert_config.json", "config_sentence_transformers.json"


def reads(**text: Any) -> Edit:
    return settings(OF_TEXTS, processing_kwargs={"text": text})


def without_settings(*names: str, file: str = "config.json") -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / file).read_text())
        left = {name: each for name, each in config.items() if name not in names}
        (folder / file).write_text(json.dumps(left))

    return edit


def tensors(change: Callable[[Tensors], object], file: str = "model.safetensors") -> Edit:
    def edit(folder: Path) -> None:
        found = load_file(folder / file)
        change(found)
        save_file({name: each.contiguous() for name, each in found.items()}, folder / file, {"format": "pt"})

    return edit


def dropped(name: str, file: str = "model.safetensors") -> Edit:
    return tensors(lambda found: found.pop(name), file)


def added(name: str, tensor: torch.Tensor, file: str = "model.safetensors") -> Edit:
    return tensors(lambda found: found.update({name: tensor}), file)


def renamed(name: str, file: str = "model.safetensors") -> Edit:
    return tensors(lambda found: found.update({f"{name}s": found.pop(name)}), file)


def with_another_row(name: str, file: str = "model.safetensors") -> Edit:
    return tensors(lambda found: found.update({name: torch.cat([found[name], found[name][:1]])}), file)


def not_finite(name: str, file: str = "model.safetensors") -> Edit:
    def spoil(found: Tensors) -> None:
        found[name].view(-1)[-1] = torch.nan

    return tensors(spoil, file)


def removed(pattern: str) -> Edit:
    def edit(folder: Path) -> None:
        for path in [*folder.glob(pattern)]:
            path.unlink()

    return edit


def written(file: str, text: str) -> Edit:
    return lambda folder: (folder / file).write_text(text, encoding="utf-8")


def in_place_of(file: str, content: bytes) -> Edit:
    """Overwrites a file that is there. `file` may be a pattern."""
    return lambda folder: next(folder.glob(file)).write_bytes(content)


def cut_short(file: str) -> Edit:
    def edit(folder: Path) -> None:
        path = next(folder.glob(file))
        path.write_bytes(path.read_bytes()[:-100])

    return edit


def sharded(folder: Path) -> None:
    """Divides the weights among two files with an index."""
    found = load_file(folder / "model.safetensors")
    names = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(found))}
    for file in set(names.values()):
        save_file({name: found[name] for name, there in names.items() if there == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def converted(folder: Path) -> None:
    """The layers beside bge-m3, as docs/models.md says how to."""
    for path in folder.glob("*_linear.pt"):
        save_file(torch.load(path, weights_only=True), path.with_suffix(".safetensors"))


def refusal(path: str | Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as refused:
        load_model(EngineConfig(model=str(path), **options), CPU)
    said = str(refused.value)
    assert "/maxsimd-" not in said, "it names the model, not a temporary folder"
    return said
