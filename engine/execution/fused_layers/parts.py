"""Parts of fused layers: linear layers joined with others of the same input or with a GELU, and the trial of
a fused module, which must ask the same of attention and give the same as the module it replaces."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.devices import milliseconds_in_turns_on_cuda
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.ops.triton.launch import is_nvidia

log = logging.getLogger(__name__)

# Rows of a full step, and of a small one.
_TIMED_ROWS = (16_384, 512)
# Milliseconds of the device for each number of rows.
_BUDGET = 20.0
# GELU is joined if that takes less than this share of the time of two launches.
_FASTER = 0.95
# Rows that are compared: no multiples of a tile's.
_COMPARED_ROWS = (3, 253)
# The joined error as a share of the error in two launches, where bfloat16 rounds twice instead of once. GELU
# by tanh adds a tenth of one rounding.
_ERROR_SHARE = 1.1


def joined_linear(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Linear layers of one input as one product, with outputs side by side. Copies their weights, unless
    there is one layer alone."""
    if len(layers) == 1:
        return layers[0]
    joined = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), device="meta")
    joined.weight = _constant(torch.cat([layer.weight.detach() for layer in layers]))
    if all(layer.bias is None for layer in layers):
        joined.register_parameter("bias", None)
        return joined
    zeros = (layer.weight.new_zeros(layer.out_features) for layer in layers)
    biases = (zero if layer.bias is None else layer.bias for layer, zero in zip(layers, zeros, strict=True))
    joined.bias = _constant(torch.cat(tuple(biases)).detach())
    return joined


class GeluLinear(nn.Module):
    """A linear layer and the exact GELU of its output in one launch, for layers that `joins_gelu` allows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.dense = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs]."""
        return joined_gelu(x, self.dense)


def joined_gelu(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """GELU of `layer(x)` in one launch, for a layer with a bias: [rows, inputs] to [rows, outputs]. On a GPU,
    cuBLASLt computes it by tanh from float32 sums and rounds once."""
    return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)


def gelu_apart(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """GELU of `layer(x)` in two launches, by the error function."""
    return nn.functional.gelu(layer(x))


def joins_gelu(layer: nn.Linear) -> bool:
    """Whether `joined_gelu` is as exact as `gelu_apart` for layers of this shape, and faster: tried once, for
    about 50 ms. Always False except in bfloat16: in float16 both differ by more than rounding."""
    weight = layer.weight
    if layer.bias is None or weight.dtype is not torch.bfloat16 or not _may_join(weight.device):
        return False
    return _is_right_and_faster(weight.device, layer.in_features, layer.out_features)


def _may_join(device: torch.device) -> bool:
    """Whether a device has compute capability 8.0 to 10.x; on 12.0 the joined product is said to be
    slower."""
    return is_nvidia(device) and (8, 0) <= torch.cuda.get_device_capability(device) < (11, 0)


@functools.cache
@torch.inference_mode()
def _is_right_and_faster(device: torch.device, inputs: int, outputs: int) -> bool:
    shape = f"GELU behind a product of {inputs} to {outputs}"
    try:
        if not _is_right(device, inputs, outputs):
            log.debug("%s: in two launches, because the fused result is less exact", shape)
            return False
        layer, times = _random_layer(device, inputs, outputs), []
        for rows in _TIMED_ROWS:
            x = _normal(device, rows, inputs)
            ways = {"joined": joined_gelu, "apart": gelu_apart}
            runs = {name: functools.partial(way, x, layer) for name, way in ways.items()}
            times.append(milliseconds_in_turns_on_cuda(runs, _BUDGET))
    except Exception as error:  # too little memory, or no such product
        log.debug("%s: in two launches, because the fused product failed: %s", shape, error)
        return False
    # By a margin, so that equal GPUs choose alike.
    faster = all(each["joined"] < _FASTER * each["apart"] for each in times)
    measured = "; ".join(
        f"{rows:,} rows {each['joined']:.4f} ms in one launch, {each['apart']:.4f} ms in two"
        for rows, each in zip(_TIMED_ROWS, times, strict=True)
    )
    log.debug("%s: in %s, by a short timing: %s", shape, "one launch" if faster else "two", measured)
    return faster


def _is_right(device: torch.device, inputs: int, outputs: int) -> bool:
    """Whether the joined result for random rows is as near to the exact one as in two launches, on average
    and at worst."""
    layer = _random_layer(device, inputs, outputs)
    errors: tuple[list[torch.Tensor], ...] = ([], [])
    for rows in _COMPARED_ROWS:
        x = _normal(device, rows, inputs, seed=rows)
        product = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        exact = nn.functional.gelu(product)
        for of_one, compute in zip(errors, (joined_gelu, gelu_apart), strict=True):
            of_one.append(compute(x, layer).double() - exact)
    joined, apart = (torch.cat(each) for each in errors)
    return all(
        float(size(joined)) <= _ERROR_SHARE * float(size(apart))  # a NaN fails
        for size in (torch.linalg.vector_norm, lambda error: error.abs().max())
    )


def _random_layer(device: torch.device, inputs: int, outputs: int) -> nn.Linear:
    """A bfloat16 layer whose outputs and bias are as large as its inputs."""
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = _constant(_normal(device, outputs, inputs, seed=1) * inputs**-0.5)
    layer.bias = _constant(_normal(device, 1, outputs, seed=2)[0])
    return layer


def _normal(device: torch.device, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    # A generator of our own: an attempt at a CUDA graph may have left the device's unusable.
    random = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=random, device=device, dtype=torch.bfloat16)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer: no adapter, no quantized weight, no hook."""
    return type(module) is nn.Linear and not has_hooks(module) and module.weight.is_floating_point()


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook other than those that transformers leaves after a request for the states of
    all layers, which do nothing in a step."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks)


def add_product_(total: torch.Tensor, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Adds a linear layer's output for `x` [rows, inputs] to `total` [rows, outputs]: without a bias in
    float32, rounded once; else the output is rounded first."""
    if type(layer) is nn.Linear and layer._parameters["bias"] is None:
        return total.addmm_(x, layer.weight.t())
    return total.add_(layer(x))  # such as one with int8 weights


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


ROWS = 5

# The difference, as a share of the largest number, that rounding makes in the sums of a few layers.
_SHARE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(slots=True, eq=False)
class RecordedAttention:
    """Stands in for a step's attention: records what a layer asks for, and gives the same random numbers each
    time."""

    asked: list[QKV] = field(default_factory=list)

    def attend(self, module: Any, qkv: QKV) -> torch.Tensor:
        copies = {name: getattr(qkv, name).clone() for name in ("query", "key", "value")}
        self.asked.append(replace(qkv, **copies))
        like = qkv.new_output()
        return random_like(like.shape, like, seed=1)


def random_like(shape: torch.Size | tuple[int, ...], like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers with the dtype and device of `like`."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float32).to(like.device, like.dtype)


@torch.inference_mode()
def record_attention(call: Callable[[RecordedAttention], torch.Tensor]) -> tuple[QKV, torch.Tensor] | None:
    """The input that a layer gives attention, and its result; None if it does not call attention once, or
    gives no tensor."""
    attention = RecordedAttention()
    given = call(attention)
    if len(attention.asked) != 1 or not isinstance(given, torch.Tensor):
        return None
    return attention.asked[0], given


def same_attention_inputs(ours: QKV, theirs: QKV) -> bool:
    """Whether two inputs of attention are the same but for rounding."""
    if (ours.scaling, ours.window) != (theirs.scaling, theirs.window) or ours.relative is not theirs.relative:
        return False
    pairs = zip((ours.query, ours.key, ours.value), (theirs.query, theirs.key, theirs.value), strict=True)
    return all(agrees(found, expected) for found, expected in pairs)


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding. NaN is not."""
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    allowed = _SHARE[expected.dtype] * float(expected.float().abs().max())
    return float((found.float() - expected.float()).abs().max()) <= allowed
