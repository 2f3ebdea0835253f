"""Replaces a model's layers by those that our kernels run, where the model gives the same with them: on a CPU
linear layers, whose weights are laid out for the kernels that multiply them, and on a GPU fused layers. Some
models read their layers' weights instead of calling the layers.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.execution import int8, linear, torch_linear, towers
from maxsimd.engine.execution.fused_layers import Fused, fuse
from maxsimd.engine.execution.packed_runner import ModelRunner
from maxsimd.engine.execution.selfcheck.proof import compare, compare_in_parts, pooler_for
from maxsimd.engine.execution.selfcheck.samples import Sample


def why_not_replaced(
    model: LoadedModel,
    runner: ModelRunner,
    samples: Sequence[Sample],
    compiled: bool,
    fusible: Collection[Fused] = (),
) -> str | None:
    """None if the model, in float32, gives the expected items for the samples with its linear layers
    replaced, behind the fusing of layers of the kinds given, and, where kernels are compiled, its tower run
    by them; else a description of the mismatch. Leaves all as it was."""
    replace: Callable[[nn.Module], int] = linear.compile_float32 if compiled else linear.hide
    roots = [*model.encoders, *_head_modules(model)]
    try:
        with towers.attention_restored(_towers(model)), _restored(roots):
            if compiled:
                towers.use_kernels(_towers(model))
            if fusible:
                fuse(model.backbone, fusible)
            for root in roots:
                replace(root)
            comparison = compare(runner, pooler_for(model.tasks), samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if comparison.agrees else f"results differ: {comparison}"


def proven_fused(
    model: LoadedModel, runner: ModelRunner, samples: Sequence[Sample]
) -> frozenset[Fused] | str:
    """The kinds of modules that can be fused if the model, in float32, gives the expected items for the
    samples with them, cut sequences and shared prefixes included where it is run so; else a description of
    the mismatch. Leaves all as it was."""
    pooler = pooler_for(model.tasks)
    try:
        with _restored([model.backbone]):
            kinds = frozenset(fuse(model.backbone))
            if not kinds:
                return kinds
            comparisons = [compare(runner, pooler, samples)]
            if runner.chunked:
                longest = max(samples, key=lambda sample: len(sample.sequence))
                comparisons.append(compare_in_parts(runner, pooler, longest))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    mismatches = [str(comparison) for comparison in comparisons if not comparison.agrees]
    return f"results differ: {mismatches[0]}" if mismatches else kinds


def lay_out_weights(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, config: EngineConfig, compiled: bool
) -> int:
    """Replaces the linear layers of backbone and heads; returns how many weights are int8.

    int8 is for the language model: what a tower makes of a picture is read by all that follows."""
    rounded = config.quantization == "int8"
    exact = [*_towers(model), *([] if rounded else [model.backbone])]
    if not compiled:
        if device.type == "cpu":
            for module in exact:
                torch_linear.lay_out(module, torch_linear.choose_way(dtype))
    else:
        for module in _head_modules(model):
            linear.compile_float32(module)
        towers.use_kernels(_towers(model))
        for module in exact:
            if dtype is torch.float32:
                linear.compile_float32(module)
            else:
                linear.compile_bfloat16(module)
    if not rounded:
        return 0
    if compiled and dtype is torch.bfloat16:
        return linear.compile_int8(model.backbone)
    return int8.round_layers(model.backbone, int8.choose_path(config.kernels == "auto"))


def _towers(model: LoadedModel) -> tuple[nn.Module, ...]:
    return () if model.vision is None else model.vision.modules


def _head_modules(model: LoadedModel) -> list[nn.Module]:
    return [module for task in model.tasks.values() for module in modules_of(task.head)]


@contextmanager
def _restored(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Restores at the end all attributes and children of the modules under `roots`."""
    before = [
        (module, dict(vars(module)), dict(module._modules)) for root in roots for module in root.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, children in before:
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)
