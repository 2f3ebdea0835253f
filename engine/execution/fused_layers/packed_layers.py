"""The layers of an encoder built as BERT's, on a CPU, as the table that our library runs in one call.

Found by structure, among layers whose products are packed; each attention is tried with random rows. That the
whole gives what the model gives is for the caller to prove.
"""

from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.cls_only_last_layer import ClsOnlyLastLayer
from maxsimd.engine.execution.fused_layers.trial import ROWS, random_like, recorded
from maxsimd.engine.execution.linear import CompiledLinear, CompiledOutput
from maxsimd.engine.ops.cpu.layers import Layer, Layers


def packed_layers(backbone: Any, most_rows: int) -> Layers | str:
    """The layers of a backbone that consists of embeddings and such layers, for steps of at most `most_rows`
    rows; or why they are not run so."""
    if _children(backbone) != {"embeddings", "encoder"} or _children(backbone.encoder) != {"layer"}:
        return "it does not consist of embeddings and layers alone"
    if any(module._forward_hooks or module._forward_pre_hooks for module in backbone.modules()):
        return "its modules have hooks"
    layers, asked = [], set()
    for number, module in enumerate(backbone.encoder.layer):
        layer = _layer(module)
        if layer is None:
            return f"layer {number} is not built as BERT's, or its products are not packed"
        attention = _attention(module.attention.self, layer)
        if attention is None:
            return f"layer {number} attends in another way"
        layers.append(layer)
        asked.add(attention)
    if len(asked) != 1:
        return "its layers attend in different ways"
    heads, scaling = asked.pop()
    try:
        return Layers(layers, heads, scaling, most_rows)
    except ValueError as error:
        return str(error)


def _layer(module: Any) -> Layer | None:
    """A layer's products and norms; None if it is not built as BERT's."""
    if _children(module) != {"attention", "intermediate", "output"}:
        return None
    if _children(module.attention) != {"self", "output"}:
        return None
    attention, wide = module.attention.self, module.intermediate
    after = module.attention.output
    if isinstance(after, ClsOnlyLastLayer):
        after = after.inner
    if _children(attention) != {"query", "key", "value", "dropout"}:
        return None
    if _children(wide) != {"dense", "intermediate_act_fn"} or not _is_gelu(wide):
        return None
    inputs = [attention.query, attention.key, attention.value]
    if not all(isinstance(each, CompiledLinear) and not each.gelu for each in inputs):
        return None
    if not isinstance(after, CompiledOutput) or not isinstance(module.output, CompiledOutput):
        return None
    query, key, value = (each.product for each in inputs)
    return Layer(
        query,
        key,
        value,
        after.product,
        after.norm,
        wide.dense.product,
        module.output.product,
        module.output.norm,
    )


def _is_gelu(wide: Any) -> bool:
    """Whether the first half of a feed-forward is one product with the exact GELU in it."""
    dense = wide.dense
    return isinstance(dense, CompiledLinear) and dense.gelu and type(wide.intermediate_act_fn) is nn.Identity


def _attention(module: Any, layer: Layer) -> tuple[int, float] | None:
    """The number of heads of a self-attention, and by what it multiplies products; None if it does anything
    else with what a layer's products give for random rows than to attend to it."""
    weights = layer.query.weights
    x = random_like((1, ROWS, weights.inputs), torch.empty(0, dtype=weights.dtype))
    found = recorded(lambda attention: module(x, step_attention=attention)[0])
    if found is None:
        return None
    qkv, _ = found
    if qkv.window is not None or qkv.relative is not None:
        return None
    with torch.inference_mode():
        for asked, made in (
            (qkv.query, module.query(x)),
            (qkv.key, module.key(x)),
            (qkv.value, module.value(x)),
        ):
            # [heads, rows, head_dim] beside [1, rows, heads * head_dim]
            if not torch.equal(asked.transpose(0, 1).reshape(made.shape), made):
                return None
    return len(qkv.query), qkv.scaling


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
