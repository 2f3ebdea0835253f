"""Weights: the files that have them, reading tensors, and whether they fit the model."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from maxsimd.engine.checkpoint.files import CheckpointFiles, find_file
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.ops.cpu.blocks import BlockTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_OF_OTHERS = frozenset({".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".xml"})


def refuse_weights(model: str, revision: str | None, files: CheckpointFiles, allow_pickle: bool) -> None:
    """Raises ModelLoadError for a checkpoint without weights and, unless `allow_pickle`, for one that has any
    part of them only as pickles."""
    pickled = (_PICKLED, f"{_PICKLED}.index.json")
    names = (_WHOLE, _INDEX, *pickled)
    if files.config_at_root and not any(find_file(model, name, revision) for name in names):
        there = [each.relative_to(model) for each in sorted(Path(model).glob("**/*")) if each.is_file()]
        named = [each.name for each in there if each.suffix == ".safetensors" and len(each.parts) == 1]
        if len(named) == 1 and not named[0].startswith("adapter_"):
            raise ModelLoadError(
                f"{model!r} has no {_WHOLE}, but {named[0]}; rename that file if it has the model's weights"
            )
        other = next((f" ({each} is for another library)" for each in there if each.suffix in _OF_OTHERS), "")
        raise ModelLoadError(
            f"{model!r} has no weights: there is neither {_WHOLE} nor {_INDEX}{other}; download it whole, or "
            "save the model anew"
        )
    root = [""] if files.config_at_root else []
    for folder in dict.fromkeys([*root, *(f"{each['path']}/" for each in files.modules if each["path"])]):
        if allow_pickle or _has_safetensors(model, folder, revision):
            continue
        # Many modules have no weights at all, so a missing safetensors file alone proves nothing.
        if any(find_file(model, folder + name, revision) for name in pickled):
            raise ModelLoadError(
                f"{model!r} has no {folder}{_WHOLE}; weights that are there only as pickles "
                f"({folder}{_PICKLED}) can run code as they are read: convert them to safetensors, or trust "
                "them with allow_pickle=True"
            )


def _has_safetensors(model: str, folder: str, revision: str | None) -> bool:
    index = find_file(model, folder + _INDEX, revision)
    if index is None:
        return find_file(model, folder + _WHOLE, revision) is not None
    for name in sorted({*_weight_map(model, index).values()}):
        if not name.endswith(".safetensors") or "/" in name or "\\" in name:
            raise ModelLoadError(
                f"{folder}{_INDEX} of {model!r} names {name!r}, which is no safetensors file beside it; save "
                "the weights anew, or trust them with allow_pickle=True"
            )
        is_gone = Path(model).is_dir() and not (index.parent / name).is_file()
        if is_gone and not (index.parent / _WHOLE).is_file():
            raise ModelLoadError(
                f"{folder}{name} of {model!r} is not there, and {_INDEX} names it; download it again"
            )
    return True


def _weight_map(model: str, index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index.name} of {model!r} has no map of weights: {error!r}") from error


def tensor_names(model: str, revision: str | None, folder: str = "") -> frozenset[str]:
    """The names of all tensors in a checkpoint's safetensors files, or in those of a `folder/` of it; none if
    its weights are pickles."""
    return frozenset(_file_names(model, revision, folder))


def _file_names(model: str, revision: str | None, folder: str = "") -> Mapping[str, str]:
    """The name of each tensor's file, by the tensor's name. Like transformers, prefers one file with all
    weights to an index, which may be of an earlier save."""
    whole = find_file(model, folder + _WHOLE, revision)
    if whole is None:
        index = find_file(model, folder + _INDEX, revision)
        return {} if index is None else _weight_map(model, index)
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), _WHOLE)


def files_of_tensors(model: str, revision: str | None, prefix: str = "") -> dict[str, Path]:
    """The file of each tensor of the backbone whose name starts with `prefix`, by that name. Raises
    ModelLoadError where one is missing."""
    files = _file_names(model, revision) or {prefix: _WHOLE}
    named = {tensor: file for tensor, file in files.items() if tensor.startswith(prefix)}
    paths = {file: find_file(model, file, revision) for file in sorted({*named.values()})}
    there = {file: path for file, path in paths.items() if path is not None}
    if lacking := paths.keys() - there.keys():
        raise ModelLoadError(f"{model!r} has no {min(lacking)}")
    return {tensor: there[file] for tensor, file in named.items()}


def read_tensors(model: str, revision: str | None, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, float32, by the rest of their names. Raises
    ModelLoadError for numbers that are not finite."""
    tensors = {}
    for name, path in files_of_tensors(model, revision, prefix).items():
        with safe_open(path, framework="pt") as file:
            tensors[name] = file.get_tensor(name).float()
    refuse_not_finite(model, tensors.items())
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def hold_in_memory(modules: Iterable[torch.nn.Module]) -> None:
    """Copies all weights on the CPU into the process's own memory. They may be mapped from files, which
    others can change or truncate."""
    for root in modules:
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.clone()
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device.type == "cpu":
                    module._buffers[name] = buffer.clone()


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """`read` makes all tensors of the backbone, float32 on the CPU, by the names that the checkpoint was
    published with; it raises ModelLoadError for what it cannot read. `form` says how they are stored."""

    read: Callable[[], dict[str, torch.Tensor]]
    form: str

    def in_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of `from_pretrained`, called without a path, so that it takes these weights."""
        config = options["config"]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        rest = {name: value for name, value in options.items() if name != "use_safetensors"}
        return rest | {"state_dict": self.read(), "dtype": torch.float32}


# Heads of pretraining and of other tasks, by the first part of their tensors' names. A checkpoint may have
# them on top of its backbone when only the backbone is read.
UNUSED_HEADS = frozenset(
    {
        *("classifier", "cls", "decoder", "discriminator_predictions", "generator_lm_head"),
        *("generator_predictions", "head", "lm_head", "lm_loss", "lm_predictions"),
        *("logits_proj", "mask_predictions", "mlm_head", "pooler", "pre_classifier"),
        *("predictions", "qa_outputs", "score", "sequence_summary", "sop_classifier"),
        *("vocab_layer_norm", "vocab_projector", "vocab_transform"),
    }
)
# Losses that trainers save beside a model, with weights of classes or margins of their own.
_LOSS = re.compile(r"(loss|criterion)(_|$)|.*_(loss|criterion)$")
# Buffers that older versions of transformers saved, and that follow from the config.
_BUFFERS = re.compile(r".*\b(position_ids|token_type_ids|inv_freq|masked_bias)$|.*\b(attn|attention)\.bias$")
# Names of each kind that a message lists.
_LISTED = 4


@contextmanager
def refusing_misfits(
    path: str,
    read_apart: frozenset[str],
    complete: Callable[[torch.nn.Module], None],
    stored: StoredWeights | None,
    given: frozenset[str],
) -> Iterator[None]:
    """Makes `PreTrainedModel.from_pretrained` on this thread raise ModelLoadError for a checkpoint that does
    not fit. Tensors whose names begin with a part in `read_apart` are read elsewhere. A model that fits is
    handed to `complete`, which may add to its weights and sets those that are `given`; the checkpoint may
    lack these. `stored` weights are read in place of the checkpoint's files."""
    from transformers import PreTrainedModel

    original = vars(PreTrainedModel)["from_pretrained"]
    thread = threading.get_ident()

    def checked(cls: "type[PreTrainedModel]", *arguments: Any, **options: Any) -> Any:
        load = original.__func__
        if threading.get_ident() != thread or options.get("output_loading_info"):
            return load(cls, *arguments, **options)
        # A tensor of another shape is then reported with the others, and not in an error without its name.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        if stored is not None:
            arguments, options = (None, *arguments[1:]), stored.in_options(options)
        model, info = load(cls, *arguments, **options)
        _refuse_misfit(path, model, info, read_apart | UNUSED_HEADS, given, stored is None)
        # Each tensor once, even if it has several names.
        named = model.state_dict().items()
        tensors = {_identity(tensor): (name, tensor) for name, tensor in named}
        refuse_not_finite(path, tensors.values())
        complete(model)
        return model

    PreTrainedModel.from_pretrained = classmethod(checked)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    start = tensor.addresses if isinstance(tensor, BlockTensor) else tensor
    return start.data_ptr(), tensor.shape


def refuse_not_finite(path: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ModelLoadError for a tensor that holds a NaN or an infinity. Reads each number once."""
    for name, tensor in tensors:
        if isinstance(tensor, BlockTensor):
            is_finite = tensor.is_finite()
        else:  # if the sum is finite, all numbers are; an infinite sum may also be an overflow (float16)
            is_finite = not tensor.is_floating_point() or bool(tensor.sum().isfinite())
            is_finite = is_finite or bool(tensor.isfinite().all())
        if not is_finite:
            raise ModelLoadError(f"{path!r} has numbers that are not finite in its tensor {name}")


def refuse_modules_not_finite(path: str, modules: Iterable[torch.nn.Module]) -> None:
    """Raises ModelLoadError for such a tensor in the modules behind a transformer."""
    for index, module in enumerate(modules, 1):
        prefix = f"{index}_{type(module).__name__}"
        refuse_not_finite(path, [(f"{prefix}/{name}", each) for name, each in module.state_dict().items()])


def _refuse_misfit(
    path: str,
    model: Any,
    info: Mapping[str, Any],
    harmless: frozenset[str],
    given: frozenset[str],
    leaves_layers_out: bool,
) -> None:
    is_bare = model.base_model is model  # without a head that calls its pooler
    missing = sorted(
        name
        for name in info["missing_keys"]
        if name not in given and not (is_bare and name.startswith("pooler."))
    )
    beyond, unexpected = [], []
    for name in sorted(info["unexpected_keys"]):
        if leaves_layers_out and _is_of_a_later_layer(model, name):
            beyond.append(name)
        elif not _is_harmless(model, name, harmless):
            unexpected.append(name)
    shapes = [
        f"{name} {list(found)} in place of {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    wrong = {"missing": missing, "unexpected": unexpected, "wrongly shaped": shapes}
    listed = "; ".join(f"{kind}: {some_of(names)}" for kind, names in wrong.items() if names)
    if beyond and not listed:
        log.warning(
            "%s has more layers than its config.json says; ignoring the tensors %s", path, some_of(beyond)
        )
    if listed:
        prefix = _extra_prefix(missing, unexpected)
        remedy = f"; their names begin with {prefix!r}: save the model without it" if prefix else ""
        if not remedy and unexpected == ["linear.weight"]:
            remedy = '; set architectures to ["HF_ColBERT"] in its config.json if it is a ColBERT'
        raise ModelLoadError(f"the tensors of {path!r} do not fit {type(model).__name__}: {listed}{remedy}")


def _extra_prefix(missing: list[str], unexpected: list[str]) -> str:
    """The prefix that all missing tensors have in the file, such as the name of a wrapper; "" without one."""
    for name in unexpected:
        if missing and name.endswith(f".{missing[0]}"):
            prefix = name.removesuffix(missing[0])
            return prefix if {f"{prefix}{each}" for each in missing} <= {*unexpected} else ""
    return ""


def _is_harmless(model: Any, name: str, harmless: frozenset[str]) -> bool:
    """Whether an unexpected tensor has one of the `harmless` names and belongs to no module of the model."""
    root = name.removeprefix(f"{model.base_model_prefix}.").split(".")[0]
    inside = {child for part in (model, model.base_model) for child, _ in part.named_children()}
    if root not in inside:
        return root in harmless or _LOSS.match(root) is not None
    return _BUFFERS.match(name) is not None


def _is_of_a_later_layer(model: Any, name: str) -> bool:
    """Whether a tensor belongs to a layer behind those that the config says a model has."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    own = name.removeprefix(f"{model.base_model_prefix}.")
    for path, layers in model.base_model.named_modules():
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count and own.startswith(f"{path}."):
            number = own.removeprefix(f"{path}.").split(".")[0]
            return number.isdecimal() and int(number) >= count
    return False


def some_of(names: list[str], most: int = _LISTED) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
