"""All that a document's embedding depends on beside its text, as named ingredients, and their digest.

Queries, scores and latency are no ingredients. How a document is read (windows, truncation) is part of its
own key.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import torch

from maxsimd.engine.cache.embeddings import Precision
from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.checkpoint.heads import FirstColumns, ModuleHead, head_tensors, modules_of
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu import int8_linear
from maxsimd.engine.ops.cpu.library import used_instruction_sets
from maxsimd.engine.versions import versions_of
from maxsimd.pooling.methods import Head
from maxsimd.pooling.sparse import WordsHead

# Settings that change no hidden state. `architecture` is an ingredient of its own.
_NAMES_IN_CONFIG = frozenset(
    {"_name_or_path", "architectures", "id2label", "label2id", "model_type", "problem_type"}
    | {"transformers_version"}
)
# Libraries of which another version may compute other bits.
_LIBRARIES = ("maxsimd", "torch", "transformers", "sentence-transformers", "tokenizers")

# Weights are hashed in blocks of this many bytes, on torch's number of threads.
_BLOCK = 32 * 1024 * 1024


def ingredients(
    model: LoadedModel, config: EngineConfig, dtype: torch.dtype, stored: Precision
) -> dict[str, bytes]:
    """Returns each ingredient by name. The backbone must be as it was loaded, in the precision of its file.

    `dtype` is the precision that the model will run in, and `stored` that of cached embeddings."""
    backbone: Any = model.backbone
    device = next(backbone.parameters()).device
    task, rules = model.tasks[model.score_task], model.document
    head, tokenizer = task.head, stated_tokenizer(model.tokenizer)
    towers = model.vision.modules if model.vision is not None else ()
    tower_configs = [getattr(module, "config", None) for module in towers]
    stated = {
        "architecture": f"{type(backbone).__module__}.{type(backbone).__qualname__}",
        "settings": settings_of(backbone.config),
        "template": tokenizer.pop("post_processor", None),
        "tokenizer": tokenizer,
        "inputs": getattr(model.tokenizer, "model_input_names", None),
        "prompt": rules.prompt,
        "prompt pooled": rules.pool_prompt,
        "special tokens pooled": (rules.pool_specials, rules.pool_first),
        "fixed tokens": [
            None if ids is None else ids.tolist() for ids in (rules.leading_ids, rules.trailing_ids)
        ],
        "chat template": None if rules.chat is None else rules.chat.signature,
        "pictures": None if model.vision is None else model.vision.signature,
        "tower settings": [settings_of(config) for config in tower_configs if config is not None],
        "document length": rules.max_tokens,
        "truncation side": model.truncation_side,
        "expansion": _expansion(rules),
        "model length": model.max_tokens,
        "skip list": None if rules.skipped_ids is None else rules.skipped_ids.tolist(),
        "pooling": task.pooling,
        "head": _modules(head),
        "dimensions": (head.dimensions, head.normalized) if isinstance(head, FirstColumns) else None,
        "token pooling": _token_pooling(model),
        "precision": str(dtype),
        "stored precision": stored,
        "quantization": config.quantization,
        "kernels": [config.kernels == "auto" and each.is_available() for each in (kernels, int8_linear)],
        "attention": config.attention,
        "packing": config.packing,
        # The MaxSim option decides whether the head runs as one kernel: Triton's does.
        "fused head": config.maxsim if device.type == "cuda" or config.maxsim == "triton" else None,
        "device": _device(device),
        "versions": versions_of(_LIBRARIES),
    }
    return {
        "weights": digest_tensors(sorted(backbone.named_parameters(), key=itemgetter(0))),
        "buffers": digest_tensors(sorted(saved_buffers(backbone), key=itemgetter(0))),
        # Without module numbers: `head` has the order.
        "head weights": digest_tensors(
            (name.partition(".")[2], tensor) for name, tensor in head_tensors(head)
        ),
        "tower weights": digest_tensors(
            (f"{i}.{name}", tensor)
            for i, module in enumerate(towers)
            for name, tensor in sorted(module.state_dict().items())
        ),
        **{name: repr(value).encode() for name, value in stated.items()},
    }


def fingerprint(parts: Mapping[str, bytes]) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(parts.items()):
        digest.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(value).digest())
    return digest.digest()


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Digests names, shapes, types and values. Common CPUs have instructions for SHA-256."""
    named = list(tensors)
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    blocks = (
        block for _, tensor in named for block in tensor.detach().reshape(-1).view(torch.uint8).split(_BLOCK)
    )
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for part in pool.map(lambda block: hashlib.sha256(block.cpu().numpy().data).digest(), blocks):
            digest.update(part)
    return digest.digest()


def saved_buffers(backbone: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers in a checkpoint. The others follow from architecture and settings."""
    for path, module in backbone.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def settings_of(config: Any) -> tuple[object, ...]:
    """Returns a backbone's config, and which of its own attention functions it runs if it is not packed."""
    stated = [(name, value) for name, value in config.to_dict().items() if name not in _NAMES_IN_CONFIG]
    return sorted(stated, key=itemgetter(0)), getattr(config, "_attn_implementation", None)


def stated_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Returns a tokenizer's description, without traces of earlier calls."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stated: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    return {name: value for name, value in stated.items() if name not in ("truncation", "padding")}


def _modules(head: Head) -> list[object]:
    """Describes a head's modules in their order. Raises TypeError for an unknown kind of head."""
    if isinstance(head, FirstColumns):
        return _modules(head.inner)
    if isinstance(head, WordsHead):
        looked_up = None
        if head.static_weights is not None:
            looked_up = digest_tensors([("static", head.static_weights)]), sorted(map(str, head.static_roles))
        return [str(head), *map(repr, modules_of(head)), looked_up]
    if not isinstance(head, ModuleHead):
        raise TypeError(f"a {type(head).__name__} cannot be described for the cache")
    return [(type(module).__qualname__, repr(module)) for module in head.modules]


def _token_pooling(model: LoadedModel) -> tuple[object, ...] | None:
    pooling = model.token_pooling
    if pooling is None:
        return None
    method = pooling.method
    return type(method).__qualname__, method.get_config_dict(), sorted(map(str, pooling.roles))


def _expansion(rules: RoleRules) -> tuple[object, ...] | None:
    expansion = rules.expansion
    if expansion is None and rules.last_id is None:
        return None
    return rules.last_id, None if expansion is None else dataclasses.astuple(expansion)


def _device(device: torch.device) -> tuple[object, ...]:
    """Returns the kind of device, as far as another would compute other bits."""
    if device.type == "cuda":
        return "cuda", torch.cuda.get_device_name(device)
    if device.type != "cpu":
        name = getattr(getattr(torch, device.type, None), "get_device_name", None)
        return device.type, "" if name is None else str(name(device))
    capability, has_tiles = torch.backends.cpu.get_cpu_capability(), torch.cpu._is_amx_tile_supported()
    return device.type, capability, has_tiles, used_instruction_sets()
