"""A file's tensors under the names that the checkpoint was published with."""

import re

import torch

from maxsimd.engine.checkpoint.gguf.container import GgufFile
from maxsimd.engine.checkpoint.gguf.families import ANSWERS, Config, Family
from maxsimd.engine.errors import ModelLoadError

_LAYER = re.compile(r"^blk\.(\d+)\.")


def refuse_unnamed(file: GgufFile, family: Family) -> None:
    """Raises ModelLoadError for tensors that the family does not have."""
    unnamed = sorted(name for name in file.names if _published(name, family) is None)
    if unnamed:
        listed = ", ".join(unnamed[:4]) + (f" and {len(unnamed) - 4} more" if len(unnamed) > 4 else "")
        raise ModelLoadError(
            f"{file.path} has tensors that a {file.architecture} is not read with here: {listed}; name the "
            "checkpoint that it was made from"
        )


def read_tensors(file: GgufFile, family: Family, config: Config) -> dict[str, torch.Tensor]:
    """All tensors, float32, as they were before the conversion. Raises ModelLoadError for what
    `GgufFile.tensors` does not read."""
    prefix = family.prefix if config["architectures"][0] == family.whole else ""
    tensors = {}
    for name, stored in file.tensors():
        published = _published(name, family)
        assert published is not None
        own = published if published.startswith("classifier.") else prefix + published
        tensors[own] = family.undo(name, stored, config).contiguous()
    answers = tensors.pop(f"{ANSWERS}.weight", None)
    if answers is not None:
        tensors["lm_head.weight"] = _output_layer(file, tensors, answers)
    return tensors


def _published(name: str, family: Family) -> str | None:
    stem, _, ending = name.rpartition(".")
    layer = _LAYER.match(stem)
    found = family.names.get(_LAYER.sub("blk.{}.", stem))
    if found is None or ending not in ("weight", "bias"):
        return None
    return f"{found.format(layer[1] if layer else '')}.{ending}"


def _output_layer(file: GgufFile, tensors: dict[str, torch.Tensor], answers: torch.Tensor) -> torch.Tensor:
    """The output layer of a reranker, of which the file may have only the rows of its answers, yes and no: in
    the rows of all other words is what ties them, the embeddings. Nothing reads those."""
    labels = file.setting("classifier.output_labels")
    if labels != ["yes", "no"] or len(answers) != len(labels):
        raise ModelLoadError(f"{file.path} answers with {labels}; a reranker that answers yes or no is read")
    words = file.get("tokenizer.ggml.tokens")
    rows = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).clone()
    for label, answer in zip(labels, answers, strict=True):
        rows[words.index(label)] = answer
    return rows
