"""Whether a checkpoint fits the model that it is read into: every tensor of the model is in the checkpoint,
every tensor of the checkpoint is the model's, shapes agree, and all numbers are finite. A checkpoint that
does not fit would be served with random weights."""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from maxsimd.engine.checkpoint.stored import StoredWeights
from maxsimd.engine.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Heads of pretraining and of other tasks, by the first part of their tensors' names. A checkpoint may have
# them on top of its backbone when only the backbone is read.
UNUSED_HEADS = frozenset(
    {
        "classifier",
        "cls",
        "decoder",
        "discriminator_predictions",
        "generator_lm_head",
        "generator_predictions",
        "head",
        "lm_head",
        "lm_loss",
        "lm_predictions",
        "logits_proj",
        "mask_predictions",
        "mlm_head",
        "pooler",
        "pre_classifier",
        "predictions",
        "qa_outputs",
        "score",
        "sequence_summary",
        "sop_classifier",
        "vocab_layer_norm",
        "vocab_projector",
        "vocab_transform",
    }
)
# What trainers save beside a model: its loss, with weights of classes or margins of its own.
_LOSS = re.compile(r"(loss|criterion)(_|$)|.*_(loss|criterion)$")
# Buffers that older versions of transformers saved, and that follow from the config.
_BUFFERS = re.compile(r".*\b(position_ids|token_type_ids|inv_freq|masked_bias)$|.*\b(attn|attention)\.bias$")

log = logging.getLogger(__name__)

# How many names a message lists of each kind.
_LISTED = 4


@contextmanager
def refusing_misfits(
    path: str,
    read_apart: frozenset[str] = frozenset(),
    complete: Callable[[torch.nn.Module], None] | None = None,
    stored: StoredWeights | None = None,
    given: frozenset[str] = frozenset(),
) -> Iterator[None]:
    """Inside this context, `PreTrainedModel.from_pretrained` on this thread raises ModelLoadError for a
    checkpoint that does not fit. Tensors whose names begin with a part in `read_apart` are read elsewhere.
    A model that fits is handed to `complete`, which may add to its weights and sets those that are `given`;
    the checkpoint may lack these. Where weights are `stored` in a
    form of their own, these are read in place of files of the checkpoint."""
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
        _refuse_misfit(path, model, info, read_apart, given, leaves_layers_out=stored is None)
        # Each tensor once, even if it has several names.
        named = model.state_dict().items()
        tensors = {(tensor.data_ptr(), tensor.shape): (name, tensor) for name, tensor in named}
        refuse_not_finite(path, tensors.values())
        if complete is not None:
            complete(model)
        return model

    PreTrainedModel.from_pretrained = classmethod(checked)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original


def refuse_not_finite(path: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ModelLoadError for a tensor that holds a NaN or an infinity. Reads each number once."""
    for name, tensor in tensors:
        # If the sum is finite, all numbers are; an infinite sum may also be an overflow (float16).
        if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
            continue
        if not bool(tensor.isfinite().all()):
            raise ModelLoadError(f"{path!r} has numbers that are not finite in its tensor {name}")


def refuse_modules_not_finite(path: str, modules: Iterable[torch.nn.Module]) -> None:
    """Raises ModelLoadError for such a tensor in the modules after a transformer, which are named by index
    and type."""
    for index, module in enumerate(modules, 1):
        named = module.state_dict().items()
        refuse_not_finite(
            path, [(f"{index}_{type(module).__name__}/{name}", tensor) for name, tensor in named]
        )


def _refuse_misfit(
    path: str,
    model: Any,
    info: Mapping[str, Any],
    read_apart: frozenset[str],
    given: frozenset[str],
    *,
    leaves_layers_out: bool,
) -> None:
    lacking = [name for name in info["missing_keys"] if name not in given]
    missing = sorted(name for name in lacking if not _is_unused_pooler(model, name))
    beyond, unexpected = [], []
    for name in sorted(info["unexpected_keys"]):
        if leaves_layers_out and _is_of_a_later_layer(model, name):
            beyond.append(name)
        elif not _is_harmless(model, name, read_apart | UNUSED_HEADS):
            unexpected.append(name)
    shapes = [
        f"{name} {list(found)} in place of {list(wanted)}"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    wrong = {"missing": missing, "unexpected": unexpected, "wrongly shaped": shapes}
    listed = "; ".join(f"{kind}: {_shortened(names)}" for kind, names in wrong.items() if names)
    if beyond and not listed:
        log.warning(
            "%s has more layers than its config.json says; ignoring the tensors %s",
            path,
            _shortened(beyond),
        )
    if listed:
        raise ModelLoadError(f"the tensors of {path!r} do not fit {type(model).__name__}: {listed}")


def _is_unused_pooler(model: Any, name: str) -> bool:
    """Whether a tensor belongs to the pooler of a backbone without a head, which is never called."""
    return model.base_model is model and name.split(".")[0] == "pooler"


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


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
