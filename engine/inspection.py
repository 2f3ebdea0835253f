"""What the engine would do with a model, in words, without serving it."""

from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel, RoleRules, load_model
from maxsimd.engine.checkpoint.model import HYBRID_EMBED, SPARSE_EMBED
from maxsimd.engine.config import EngineConfig, ScoreType
from maxsimd.engine.device.facts import kernels_in_words
from maxsimd.engine.execution import PreparedModel, choose_device, prepare
from maxsimd.engine.media import Picture
from maxsimd.engine.preprocess import check_room
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.scoring.maxsim import choose_maxsim

# A small picture, and an A4 page at 150 dots an inch.
_PAGES = ((448, 448), (1240, 1754))
_SCORED_BY = {
    "maxsim": "MaxSim, the sum over query tokens of their best match",
    "meanmaxsim": "MaxSim, the mean over query tokens of their best match",
    "cosine": "cosine of the embeddings",
    "dot": "dot product of the embeddings",
    "euclidean": "Euclidean distance of the embeddings, below 0",
    "manhattan": "Manhattan distance of the embeddings, below 0",
    "sparse": "dot product of sparse vectors",
    "sparse-cosine": "cosine of sparse vectors",
    "sparse-euclidean": "Euclidean distance of sparse vectors, below 0",
    "sparse-manhattan": "Manhattan distance of sparse vectors, below 0",
    "hybrid": "dense, sparse and multi-vector scores",
}


def inspect_model(config: EngineConfig, check: bool = False) -> dict[str, str | list[str]]:
    """Loads and prepares the model that the configuration names, and says by name what was found out; with
    `check` also what was compared to find out, how many sequences of it, and the largest differences.

    Raises ModelLoadError as serving it would."""
    device = choose_device(config.device)
    model = load_model(config, device, recheck=check)
    named = {name: parameter.numel() for name, parameter in model.backbone.named_parameters()}
    of_tower = sum(each.numel() for module in model.encoders[1:] for each in module.parameters())
    prepared = prepare(model, config, device)
    budget = prepared.step_tokens
    check_room(model, TextTokenizer(model.tokenizer, model.token_rows), budget, prepared.runner.chunked)
    # A pooler goes where the heads do its work, and layers are laid out anew: what is left shows in names.
    left = {name for name, _ in model.backbone.named_children()}
    weights = sum(count for name, count in named.items() if name.split(".")[0] in left or "." not in name)
    weights += of_tower
    rows: dict[str, str | list[str]] = {
        "model": model.name,
        "architecture": model.architecture,
        "kind": model.score_type.value,
        "score": _score(model),
        **{task: _task(model, task) for task in model.tasks},
        "more": _more(model),
        **_inputs(model),
        "pictures": _pictures(model),
        "longest input": f"{model.max_tokens} tokens",
        "attention": "causal, prefilled in chunks" if prepared.runner.chunked else _attention(model),
        "execution": _execution(prepared),
        "precision": _precision(prepared, model),
        "weights": f"{weights / 1e6:.1f} million, {_bytes(prepared, weights) / 1e6:.1f} MB",
        "device": str(device),
        "kernels": _kernels(config, device, prepared),
    }
    if check:
        own = [f"as transformers reads and runs it: {model.compared}"] if model.compared else []
        rows["checked"] = own + [str(finding) for finding in prepared.findings]
    return {name: value for name, value in rows.items() if value}


def show(rows: dict[str, str | list[str]]) -> str:
    """Rows as aligned lines, one for each value."""
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        values = [value] if isinstance(value, str) else value
        lines += [
            f"{title:<{width}}  {one}"
            for title, one in zip([name, *[""] * len(values)], values, strict=False)
        ]
    return "\n".join(lines)


def _score(model: LoadedModel) -> str:
    if model.listwise is not None:
        rules = model.listwise
        return (
            "cosine of each document's marker with the query's, "
            f"up to {rules.block_documents} documents or {rules.context} tokens a pass"
        )
    if model.score_type is not ScoreType.CROSS_ENCODER:
        weights = ", ".join(f"{weight:g}" for weight in model.hybrid_weights)
        weighed = f", weighted {weights}" if model.similarity == "hybrid" else ""
        return _SCORED_BY[model.similarity] + weighed
    if model.score_label is not None:
        return f"the probability of {model.labels[model.score_label]}, one of {len(model.labels)} labels"
    if len(model.labels) > 1:
        return f"none, with {len(model.labels)} labels: {', '.join(model.labels)}"
    return f"the classifier's output through {type(model.activation).__name__}"


def _more(model: LoadedModel) -> str:
    """What else the checkpoint gives, where it is asked for."""
    if model.unread:
        files = " and ".join(model.unread)
        return f"{files}, not read: sparse, multi-vector and hybrid if pickles are allowed"
    kinds = {
        SPARSE_EMBED: "sparse",
        HYBRID_EMBED: "hybrid",
        "token_embed": "late-interaction",
        "embed": "bi-encoder",
    }
    if HYBRID_EMBED not in model.tasks:
        either = {SPARSE_EMBED: "bi-encoder", "embed": "sparse"}
        both = either.keys() <= model.tasks.keys() and model.score_task in either
        return f"scored as {either[model.score_task]} too" if both else ""
    others = [kind for task, kind in kinds.items() if task in model.tasks and task != model.score_task]
    return f"scored as {', '.join(others[:-1])} or {others[-1]} too"


def _task(model: LoadedModel, name: str) -> str:
    task = model.tasks[name]
    if task.words is not None:
        return f"pools {task.pooling}, {task.head}: weights of up to {task.words} words"
    unit = "dimensions" if name != "classify" else "label" if task.dim == 1 else "labels"
    normalised = ", normalised" if task.normalised else ""
    return f"pools {task.pooling}, then {task.head}: {task.dim} {unit}{normalised}"


def _inputs(model: LoadedModel) -> dict[str, str]:
    """How texts become token ids."""
    rows = {}
    if model.score_type is ScoreType.CROSS_ENCODER:
        rows["pair"] = "joined by the tokeniser" if model.pairs.template is None else "joined by a template"
        rows["pair"] += f", cut by {model.pairs.truncation}"
        if model.compression is not None:
            rows["compression"] = str(model.compression)
        if model.pairs.template is not None:
            rows["instruction"] = repr(model.instruction or model.pairs.template.instruction or "")
            rows["instruction"] = rows["instruction"] if model.takes_instruction else "not taken"
        return rows
    if model.listwise is not None:
        return {"instruction": "taken" if model.instruction is None else repr(model.instruction)}
    rows["query"] = _role(model.query, model.tokenizer)
    rows["document"] = _role(model.document, model.tokenizer)
    if model.token_pooling is not None:
        roles = " and ".join(sorted(f"{role.value}s" for role in model.token_pooling.roles))
        rows["token pooling"] = f"by {model.token_pooling.method.pool_factor:g}, {roles}"
    others = sorted(model.prompts.keys() - {"query", "document"})
    rows["other prompts"] = ", ".join(others)
    return rows


def _pictures(model: LoadedModel) -> str:
    """What a page takes, by the example of two usual sizes; nothing for a model that reads only text."""
    if model.vision is None:
        return ""
    reader = model.vision.reader
    tokens = []
    for width, height in _PAGES:
        page = Picture(np.zeros((height, width, 3), dtype=np.uint8))
        tokens.append(f"{width} x {height} pixels are {len(reader.page(reader.read(page)).ids)} tokens")
    return ", ".join(tokens)


def _role(rules: RoleRules, tokenizer: Any) -> str:
    facts = [f"behind {rules.prompt!r}" if rules.prompt else "as it is"]
    if rules.trailing_ids is not None:
        facts.append(f"before {len(rules.trailing_ids)} tokens that are always there")
    if not rules.pool_prompt and rules.prompt:
        facts.append("which is left out of pooling")
    if rules.max_tokens is not None:
        facts.append(f"at most {rules.max_tokens} tokens")
    if rules.expansion is not None:
        token = tokenizer.convert_ids_to_tokens(rules.expansion.token_id)
        attention = "attended" if rules.expansion.attended else "not attended"
        facts.append(f"filled up to {rules.expansion.length} with {token} ({attention})")
    if rules.skipped_ids is not None:
        facts.append(f"without {len(rules.skipped_ids)} skipped tokens")
    return ", ".join(facts)


def _attention(model: LoadedModel) -> str:
    return "causal, whole sequences" if model.causal else "bidirectional, whole sequences"


def _kernels(config: EngineConfig, device: torch.device, prepared: PreparedModel) -> str:
    maxsim, _ = choose_maxsim(config.maxsim, device, config.kernels == "auto")
    return kernels_in_words(device, prepared.attention, maxsim)


def _execution(prepared: PreparedModel) -> str:
    reason = "" if prepared.not_packed is None else f": {prepared.not_packed}"
    return f"{prepared.execution}{reason}"


def _precision(prepared: PreparedModel, model: LoadedModel) -> str:
    linear = ", linear layers int8" if prepared.quantized else ""
    stored = model.stored_as or _name(model.file_dtype)
    return f"{_name(prepared.dtype)}{linear} (in the file: {stored})"


def _bytes(prepared: PreparedModel, weights: int) -> int:
    return (weights - prepared.quantized) * prepared.dtype.itemsize + prepared.quantized


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
