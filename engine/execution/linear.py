"""Linear layers on a CPU, and BERT's embeddings before them, by our kernels or torch's fastest method.

Our kernels lay out weights once and fuse the operation that follows. `nn.Linear` reorders its weight in every
call, and its result for a row depends in the last bits on the number of rows. torch's methods differ by far:
MKL uses AVX-512 on some makers' processors alone, and 16-bit products are slow without native support."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.devices import milliseconds_in_turns
from maxsimd.engine.ops import elementwise
from maxsimd.engine.ops.cpu.library import used_instruction_sets
from maxsimd.engine.ops.cpu.linear import (
    LANES,
    Norm,
    Product,
    Tables,
    Weights,
    embed,
    gated_order,
    pack_float32,
)

log = logging.getLogger(__name__)
Pack = Callable[[torch.Tensor], Weights]
# Makes a replacement, told whether it computes the GELU after the layer.
Make = Callable[[nn.Linear, bool], nn.Module]
# A feed-forward's first linear layer and the activation that follows it, by attribute name.
_FUSABLE = {"dense": "intermediate_act_fn", "lin1": "activation"}


class ReplacedLinear(nn.Module):
    """Replaces an `nn.Linear`. `weight` has no contents; models ask for its precision or shape."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = torch.empty_like(layer.weight, device="meta", requires_grad=False)


class CompiledLinear(ReplacedLinear):
    """Runs a layer, and the GELU after it if `gelu` is set, by our kernels. With int8 weights, activations
    are rounded to int8 too, row by row."""

    def __init__(self, layer: nn.Linear, gelu: bool, pack: Pack) -> None:
        super().__init__(layer)
        self.product = _product(layer, pack)
        self.gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.linear(x, self.gelu)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output for `x` plus the residual, in one call. For layers without GELU."""
        return self.product.added(x, residual)


class CompiledOutput(nn.Module):
    """Replaces the end of the attention and the feed-forward of a BERT layer: a linear layer, the residual
    sum, and a layer norm."""

    def __init__(self, output: Any, pack: Pack) -> None:
        super().__init__()
        self.product, self.norm = _product(output.dense, pack), norm_of(output.LayerNorm)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.product.linear_norm(hidden_states, input_tensor, self.norm)


class Gated(nn.Module):
    """The first products of a feed-forward as one, with the gate first."""

    def __init__(self, up: nn.Linear, activation: elementwise.Activation) -> None:
        super().__init__()
        self.up, self.activation = up, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, inner]."""
        return elementwise.gated(self.up(x), self.activation)


class CompiledGated(nn.Module):
    """Replaces a `Gated` by our kernels, which apply the gate in registers."""

    def __init__(self, replaced: Gated, pack: Pack) -> None:
        super().__init__()
        self.activation = replaced.activation
        order = gated_order(replaced.up.out_features // 2)
        bias = replaced.up.bias
        in_order = None if bias is None else bias.detach().float()[order]
        self.product = Product(pack(replaced.up.weight.detach()[order]), in_order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, inner]."""
        return self.product.gated(x, self.activation)


def norm_of(module: nn.LayerNorm) -> Norm:
    """A layer norm with a weight and a bias as our kernels read it."""
    return Norm(module.weight.detach().float(), module.bias.detach().float(), module.eps)


class _Called(nn.Module):
    """Calls a function in the place of a module."""

    def __init__(self, function: Callable[..., torch.Tensor], **attributes: int) -> None:
        super().__init__()
        self._function = function
        vars(self).update(attributes)

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._function(*arguments, **options)


def hide_weights(module: nn.Module) -> int:
    """Replaces every layer by one that hides its weight. A model that still gives the same calls its layers
    instead of reading their weights, so any replacement will do."""

    def hidden(layer: nn.Linear, gelu: bool) -> _Called:
        called = nn.Sequential(layer, nn.GELU()) if gelu else layer
        return _Called(called.__call__, in_features=layer.in_features, out_features=layer.out_features)

    def hidden_output(output: Any) -> _Called:
        return _Called(
            lambda hidden_states, input_tensor: output.LayerNorm(output.dense(hidden_states) + input_tensor)
        )

    return replace_layers(module, hidden, hidden_output)


def _product(layer: nn.Linear, pack: Pack) -> Product:
    bias = layer.bias.detach().float() if layer.bias is not None else None
    return Product(pack(layer.weight.detach()), bias)


def compile_layers(module: nn.Module, pack: Pack) -> int:
    """Replaces the layers within a backbone or a head by our kernels, with weights as `pack` lays them out;
    returns the number of weights. With float32 weights, layers in 16 bits stay."""

    def is_replaced(layer: nn.Linear) -> bool:
        return pack is not pack_float32 or layer.weight.dtype is torch.float32

    compile_embeddings(module)
    replaced = 0
    for parent, name, child in children_within(module):
        if isinstance(child, Gated) and is_replaced(child.up) and child.up.out_features % (2 * LANES) == 0:
            replaced += child.up.weight.numel()
            setattr(parent, name, CompiledGated(child, pack))
    return replaced + replace_layers(
        module,
        lambda layer, gelu: CompiledLinear(layer, gelu, pack),
        lambda output: CompiledOutput(output, pack),
        is_replaced,
    )


def children_within(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """All modules within a module, each with its parent and its name there."""
    return [(parent, name, child) for parent in module.modules() for name, child in parent.named_children()]


def replace_layers(
    backbone: nn.Module,
    make_linear: Make,
    make_output: Callable[[Any], nn.Module] | None = None,
    is_replaced: Callable[[nn.Linear], bool] = lambda layer: True,
) -> int:
    """Replaces every `nn.Linear`, told whether it computes the GELU after it; first, with a `make_output`,
    the ends of the parts of a BERT layer. Returns the number of weights."""
    replaced = 0
    for parent, name, child in children_within(backbone):
        if make_output is not None and _is_output(child) and is_replaced(child.dense):
            replaced += child.dense.weight.numel()
            setattr(parent, name, make_output(child))
    for parent, name, child in children_within(backbone):
        if type(child) is nn.Linear and is_replaced(child):
            gelu = is_exact_gelu(getattr(parent, _FUSABLE.get(name, ""), None))
            setattr(parent, name, make_linear(child, gelu))
            if gelu:
                setattr(parent, _FUSABLE[name], nn.Identity())
            replaced += child.weight.numel()
    return replaced


def _is_output(module: Any) -> bool:
    """Whether a module has the children of a BERT output module, and computes the same."""
    is_named_so = type(module).__name__.endswith("Output")
    if not is_named_so or children_of(module) != {"dense", "LayerNorm", "dropout"}:
        return False
    dense, norm = module.dense, module.LayerNorm
    if type(dense) is not nn.Linear or not is_layer_norm(norm):
        return False
    x = torch.linspace(-1, 1, dense.in_features, dtype=dense.weight.dtype)[None]
    residual = torch.linspace(2, -1, dense.out_features, dtype=dense.weight.dtype)[None]
    try:
        with torch.inference_mode():
            return torch.equal(module(x, residual), norm(dense(x) + residual))
    except (TypeError, RuntimeError):
        return False  # its forward takes other arguments


def is_layer_norm(module: nn.Module) -> bool:
    """Whether a module is a plain layer norm with a weight and a bias."""
    return type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None


def children_of(module: nn.Module) -> set[str]:
    """The names of a module's children."""
    return {name for name, _ in module.named_children()}


def is_exact_gelu(activation: Any) -> bool:
    """Whether a module is GELU by the error function."""
    if isinstance(activation, nn.GELU):
        return activation.approximate == "none"
    # transformers' class, by its name: importing it takes a second.
    return type(activation).__name__ == "GELUActivation" and activation.act is nn.functional.gelu


# Rows that are tried, and the share of their length by which they may differ.
_ROWS = 32
_EMBEDDING_SHARE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_CHILDREN = {"word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout"}


class CompiledEmbeddings(nn.Module):
    """Replaces BERT's embeddings, the sum of three tables' rows and its norm, by one call of our library.
    Calls with anything but ids go to the replaced module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = (module,)  # out of the module tree
        self.word_embeddings = module.word_embeddings
        words, types, positions = (table.weight.detach().contiguous() for table in _tables_of(module))
        self._tables = Tables(words, types, positions, norm_of(module.LayerNorm))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        # Given positions count from there already.
        given = {name for name, value in others.items() if value is not None} - {"past_key_values_length"}
        if input_ids is None or position_ids is None or given:
            made: torch.Tensor = self._module[0](
                input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids, **others
            )
            return made
        types = None if token_type_ids is None else token_type_ids.expand_as(input_ids).reshape(-1)
        positions = position_ids.expand_as(input_ids).reshape(-1)
        return embed(self._tables, input_ids.reshape(-1), positions, types).view(*input_ids.shape, -1)


def compile_embeddings(backbone: nn.Module) -> None:
    """Replaces every such module within a backbone that gives the same but for rounding."""
    for parent, name, child in children_within(backbone):
        if _is_built_so(child) and _gives_the_same(ours := CompiledEmbeddings(child), child):
            setattr(parent, name, ours)


def _is_built_so(module: Any) -> bool:
    if children_of(module) != _CHILDREN:
        return False
    if any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()):
        return False
    tables = _tables_of(module)
    if not all(type(table) is nn.Embedding for table in tables) or not is_layer_norm(module.LayerNorm):
        return False
    return {table.weight.dtype for table in tables} in ({torch.float32}, {torch.bfloat16})


def _tables_of(module: Any) -> tuple[Any, Any, Any]:
    return module.word_embeddings, module.token_type_embeddings, module.position_embeddings


@torch.inference_mode()
def _gives_the_same(ours: nn.Module, module: Any) -> bool:
    """For random ids, with types and without."""
    generator = torch.Generator().manual_seed(0)
    words, types, positions = (
        torch.randint(table.num_embeddings, (1, _ROWS), generator=generator) for table in _tables_of(module)
    )
    ids = {"input_ids": words, "position_ids": positions}
    try:
        for each in (ids, ids | {"token_type_ids": types}):
            found, expected = ours(**each), module(**each)
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                return False
            off = (found.double() - expected.double()).norm()
            if not off <= _EMBEDDING_SHARE[expected.dtype] * expected.double().norm():
                return False
    except Exception:  # it takes something else
        return False
    return True


# Rows and sides of the layer that is timed.
_TIMED_ROWS, _TIMED_SIDE = 128, 768
# Another method must be this many times as fast as `nn.Linear`: oneDNN also compiles a kernel for each number
# of rows.
_MARGIN = 1.2
# The largest difference from torch's result, as a share of the largest number.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class OneDnnLinear(ReplacedLinear):
    """Runs a layer, and the exact GELU after it if `gelu` is set, by oneDNN's product with a weight that is
    laid out once."""

    def __init__(self, layer: nn.Linear, gelu: bool) -> None:
        super().__init__(layer)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self._bias = layer.bias.detach() if layer.bias is not None else None
        self._activation = "gelu" if gelu else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = len(rows)
        if count == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = nn.functional.pad(rows, (0, 0, 0, rounded(count) - count))
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, self._activation, [], "none"
        )
        return out[:count].view(*x.shape[:-1], self.out_features)


def rounded(rows: int) -> int:
    """`rows` rounded up by at most an eighth or 7, to few different numbers: oneDNN compiles a kernel of
    about 0.4 MB for each, and torch keeps a thousand."""
    step = max(8, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


class Float32Linear(ReplacedLinear):
    """Runs a layer with a 16-bit weight, and the GELU after it if `gelu` is set, in float32."""

    def __init__(self, layer: nn.Linear, gelu: bool) -> None:
        super().__init__(layer)
        self.weight, self.bias = layer.weight, layer.bias
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        out = nn.functional.linear(x.float(), self.weight.float(), bias)
        return (nn.functional.gelu(out) if self._gelu else out).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Method:
    """A method of multiplying: its name, and how it replaces a layer, None to leave layers as they are."""

    name: str
    make: Make | None


TORCH = Method("torch", None)


@functools.cache
def choose_method(dtype: torch.dtype) -> Method:
    """The method for layers of this precision in this process, by a short timing."""
    right = [method for method in methods_for(dtype) if is_right_method(method, dtype)]
    milliseconds = _milliseconds([TORCH, *right], dtype)
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    name = fastest if _MARGIN * milliseconds[fastest] <= milliseconds[TORCH.name] else TORCH.name
    measured = ", ".join(f"{each} {taken:.2f} ms" for each, taken in milliseconds.items())
    precision = str(dtype).removeprefix("torch.")
    log.debug(
        "%s: %s, by a short timing on a CPU with %s: %s", precision, name, used_instruction_sets(), measured
    )
    return next(method for method in (TORCH, *right) if method.name == name)


def methods_for(dtype: torch.dtype) -> list[Method]:
    found = []
    if torch.backends.mkldnn.is_available() and dtype is not torch.float16:
        found.append(Method("oneDNN", OneDnnLinear))
    if dtype is not torch.float32:
        found.append(Method("float32 products", Float32Linear))
    return found


@torch.inference_mode()
def is_right_method(method: Method, dtype: torch.dtype) -> bool:
    """Whether a method gives the float32 results of torch's layers, on random ones with and without GELU."""
    generator = torch.Generator().manual_seed(0)
    try:
        for rows, inputs, columns, gelu in ((1, 70, 33, False), (37, 256, 64, True)):
            layer = _random_layer(inputs, columns, dtype, generator)
            x = torch.randn(rows, inputs, generator=generator, dtype=torch.float32).to(dtype)
            expected = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
            expected = nn.functional.gelu(expected) if gelu else expected
            found = x if method.make is None else method.make(layer, gelu)(x)
            difference = (found.float() - expected).abs().max()
            if found.dtype is not dtype or not difference <= _TOLERANCE[dtype] * expected.abs().max():
                return False
    except Exception as error:
        log.debug("linear layers in %s by %s do not run here: %s", dtype, method.name, error)
        return False
    return True


def replace_by_method(module: nn.Module, method: Method) -> int:
    """Replaces every `nn.Linear`; returns the number of weights."""
    return 0 if method.make is None else replace_layers(module, method.make)


def _random_layer(inputs: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, columns, dtype=dtype)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
    return layer


@torch.inference_mode()
def _milliseconds(methods: list[Method], dtype: torch.dtype) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    layer = _random_layer(_TIMED_SIDE, _TIMED_SIDE, dtype, generator)
    x = torch.randn(_TIMED_ROWS, _TIMED_SIDE, generator=generator, dtype=torch.float32).to(dtype)
    layers: Mapping[str, nn.Module] = {
        method.name: layer if method.make is None else method.make(layer, False) for method in methods
    }
    return milliseconds_in_turns({name: functools.partial(each, x) for name, each in layers.items()})
