"""A checkpoint that does not fit its model is refused by the name of what is wrong, whatever family it is
of."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.files import VOCABULARIES
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.families import FAMILIES, LISTWISE, Family

CPU = torch.device("cpu")
ALL = [*FAMILIES, LISTWISE]
Tensors = dict[str, torch.Tensor]

# Checkpoints with code of their own: their tensor beside its names in transformers, which messages may use.
_RENAMED = {
    "encoder.layers.1.norm1.bias": (
        "layers.1.post_attention_layernorm.bias",
        "layer.1.attention.output.LayerNorm.bias",
    ),
    "encoder.layer.1.attention.o_proj.bias": ("layers.1.self_attn.o_proj.bias",),
}


def _rename(tensors: Tensors, name: str) -> None:
    tensors[f"{name}s"] = tensors.pop(name)


def _drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _reshape(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def _spoil(tensors: Tensors, name: str) -> None:
    tensors[name].view(-1)[-1] = torch.nan


DAMAGES = {"renamed": _rename, "missing": _drop, "of another shape": _reshape, "with a NaN": _spoil}


# One of each loader; `make test-all` takes all.
ONE_OF_EACH = (
    *("ColBERT", "any encoder", "BERT", "Qwen3-Reranker", "LogitScore", "nomic", "jina-reranker-v3"),
    *("Llama Nemotron Rerank", "bge-reranker-v2-minicpm-layerwise", "LFM2.5-ColBERT"),
)


def _parametrize() -> pytest.MarkDecorator:
    families = [
        pytest.param(
            family,
            id=f"{family.kind}: {family.name}",
            marks=() if family.name in ONE_OF_EACH else pytest.mark.exhaustive,
        )
        for family in ALL
    ]
    return pytest.mark.parametrize("family", families)


@pytest.fixture
def copy_of(checkpoints: SharedCheckpoints, tmp_path: Path) -> Callable[[Family], Path]:
    """A copy of a family's checkpoint that a test may damage."""
    return lambda family: checkpoints.copy(family.build, tmp_path / "copy" / "checkpoint")


def _damage(file: Path, name: str, damage: Callable[[Tensors, str], None]) -> None:
    tensors = load_file(file)
    damage(tensors, name)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})


def _weights(folder: Path) -> Path:
    """The backbone's file, at the root, in the first module's folder, or in that of a Router's model."""
    inside = [
        path
        for pattern in ("0_*", "*Transformer")
        for path in sorted(folder.glob(f"{pattern}/*.safetensors"))
    ]
    return next(path for path in (folder / "model.safetensors", *inside) if path.is_file())


def _a_tensor(file: Path) -> str:
    """A small tensor of a layer in the middle of a backbone."""
    names = sorted(name for name, tensor in load_file(file).items() if ".1." in name and tensor.dim() == 1)
    return next((name for name in names if "norm" in name.lower() or "ln_" in name), names[0])


@_parametrize()
def test_it_loads_as_it_is(family: Family, copy_of: Callable[[Family], Path]) -> None:
    load_model(EngineConfig(model=str(copy_of(family)), **family.settings), CPU)


@_parametrize()
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tensor_that_is_wrong_is_named(
    family: Family, damage: str, copy_of: Callable[[Family], Path]
) -> None:
    folder = copy_of(family)
    file = _weights(folder)
    name = _a_tensor(file)
    _damage(file, name, DAMAGES[damage])
    with pytest.raises(ModelLoadError) as refused:
        load_model(EngineConfig(model=str(folder), **family.settings), CPU)
    message = str(refused.value)
    inner = name.split(".", 1)[1]  # without the prefix that a classifier's backbone has
    renamed = [ours for theirs, all_ours in _RENAMED.items() if theirs in name for ours in all_ours]
    assert any(part in message for part in (name, inner, *renamed)), message


@_parametrize()
def test_a_checkpoint_without_a_tokeniser_is_refused(
    family: Family, copy_of: Callable[[Family], Path]
) -> None:
    folder = copy_of(family)
    for vocabulary in VOCABULARIES:
        for path in folder.rglob(vocabulary):
            path.unlink()
    with pytest.raises(ModelLoadError, match="has no tokeniser"):
        load_model(EngineConfig(model=str(folder), **family.settings), CPU)


def _modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[1-9]_*/model.safetensors"))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["GTE-ModernColBERT", "EmbeddingGemma", "native multi-vector"])
def test_a_tensor_of_a_module_behind_the_transformer_is_named(
    name: str, damage: str, copy_of: Callable[[Family], Path]
) -> None:
    folder = copy_of(next(family for family in ALL if family.name == name))
    file = _modules(folder)[0]
    _damage(file, "linear.weight", DAMAGES[damage])
    with pytest.raises(ModelLoadError, match=r"linear\.weight"):
        load_model(EngineConfig(model=str(folder)), CPU)


@pytest.mark.parametrize("damage", ["renamed", "missing", "with a NaN"])
@pytest.mark.parametrize(
    ("name", "tensor"), [("ColBERT", "linear.weight"), ("jina-reranker-v3", "projector.2.weight")]
)
def test_a_projection_beside_the_backbone_is_named(
    name: str, tensor: str, damage: str, copy_of: Callable[[Family], Path]
) -> None:
    folder = copy_of(next(family for family in ALL if family.name == name))
    _damage(folder / "model.safetensors", tensor, DAMAGES[damage])
    with pytest.raises(ModelLoadError, match=tensor.rsplit(".", 1)[0].replace(".", r"\.")):
        load_model(EngineConfig(model=str(folder)), CPU)
