"""Opens the cache that a configuration asks for, under a fingerprint of the model it belongs to."""

import hashlib
from pathlib import Path

import torch

from maxsimd.engine.cache.cache import EmbeddingCache
from maxsimd.engine.cache.disk import DiskStore
from maxsimd.engine.cache.entry import Precision
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.heads import head_tensors
from maxsimd.engine.config import EngineConfig

MIB = 1024 * 1024


def open_cache(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> EmbeddingCache | None:
    """None where it is off, or where there is nothing to keep: cross-encoders keep no documents."""
    two_stage = model.score_task in ("embed", "token_embed")
    if not two_stage or (config.cache_mb == 0 and config.cache_dir is None):
        return None
    precision: Precision = config.cache_precision if config.cache_precision != "auto" else "bfloat16"
    if config.cache_precision == "auto" and dtype is torch.float32:
        precision = "float32"
    disk = None
    if config.cache_dir is not None:
        disk = DiskStore(Path(config.cache_dir).expanduser(), config.cache_disk_mb * MIB)
    mark = fingerprint(model, precision, str(dtype), config.quantization) if disk is not None else b""
    return EmbeddingCache(mark, precision, MemoryStore(config.cache_mb * MIB), disk)


def fingerprint(model: LoadedModel, *options: str) -> bytes:
    """A digest of all that a document's embedding depends on beside its text: the weights, the tokeniser, the
    rules for documents, the head, and the given options. For a backbone as it was loaded."""
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in [
        *model.backbone.named_parameters(),
        *head_tensors(model.tasks[model.score_task].head),
    ]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    digest.update(backend.to_str().encode() if backend is not None else b"")
    task = model.tasks[model.score_task]
    rules = model.document
    skipped = b"" if rules.skipped_ids is None else rules.skipped_ids.tobytes()
    pooling = model.token_pooling
    told = (rules.prompt, rules.max_tokens, rules.pool_prompt, task.pooling, str(task.head), task.dim)
    merged = None if pooling is None else (pooling.method.get_config_dict(), sorted(map(str, pooling.roles)))
    digest.update(repr((told, merged, model.max_tokens, options)).encode() + skipped)
    return digest.digest()
