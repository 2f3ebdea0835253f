"""Describes what the engine would do with a model, without serving it."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel, RoleRules, load_model
from maxsimd.engine.checkpoint.heads import after_reference
from maxsimd.engine.checkpoint.model import HYBRID_EMBED, LABEL_SCORES, SPARSE_EMBED, TOKEN_CLASSIFY
from maxsimd.engine.checkpoint.reading import LibraryReader, Reading
from maxsimd.engine.checkpoint.recipe import in_float32
from maxsimd.engine.checkpoint.recipe_store import texts_content
from maxsimd.engine.config import EMBEDDED_MODEL, EngineConfig, ScoreType
from maxsimd.engine.device.facts import kernels_in_words
from maxsimd.engine.device.load import prepare
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.devices import choose_device, dtype_name
from maxsimd.engine.media import Picture
from maxsimd.engine.ops.cpu.blocks import BlockTensor
from maxsimd.engine.processors.registry import check_room
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.text_check import check_texts, in_library_terms, probe_sequences
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.engine.sync import SyncEngine
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import ResultSlot, Tokens, TokenSequence

# A small picture, and an A4 page at 150 dots an inch.
_PAGES = ((448, 448), (1240, 1754))
# Texts that are scored from end to end.
_QUERY = "How is a file opened?"
_DOCUMENTS = (
    "Open a file with open(), which returns a file object, and close it when it is no longer needed.",
    "a file is closed",
    "PARIS is the capital of France; some 2,100,000 people live there.",
    "Zürich liegt am Zürichsee, und man grüßt dort: Grüezi!",
    "  blanks around \n",
    "👩‍💻 opens שלום עולם",
    "How is a file opened?",
    "A long text that goes on about files, how they are opened, read and closed. " * 60,
)
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
    tokenizer = TextTokenizer(model.tokenizer, model.token_rows)
    compared = check_texts(model, config, tokenizer, None if check else texts_content(config))
    expected = _expected_scores(model, config) if check else None
    model = replace(model, reader=None)  # it holds the library's model
    named = {name: parameter.numel() for name, parameter in model.backbone.named_parameters()}
    of_tower = sum(each.numel() for module in model.encoders[1:] for each in module.parameters())
    in_blocks = [
        weight
        for module in model.backbone.modules()
        if isinstance(weight := getattr(module, "weight", None), BlockTensor)
        # int8 layers have weights of their own.
        and (config.quantization == "none" or isinstance(module, torch.nn.Embedding))
    ]
    prepared = prepare(model, config, device, probe_sequences(model, tokenizer), tokenizer)
    check_room(model, tokenizer, prepared.step_tokens, prepared.runner.chunked)
    # Preparing removes a pooler that the heads replace, and renames layers: count by the names that remain.
    left = {name for name, _ in model.backbone.named_children()}
    weights = sum(count for name, count in named.items() if name.split(".")[0] in left or "." not in name)
    weights += of_tower
    plain = weights - prepared.quantized - sum(each.numel() for each in in_blocks)
    stored = prepared.quantized + sum(each.num_bytes for each in in_blocks)
    size = plain * prepared.dtype.itemsize + stored
    chunks = "prefilled in chunks" if prepared.runner.chunked else "whole sequences"
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
        "attention": f"{'causal' if model.causal else 'bidirectional'}, {chunks}",
        "execution": prepared.execution + (f": {reason}" if (reason := prepared.not_packed) else ""),
        "precision": f"{prepared.dtype_name}{', linear layers int8' * bool(prepared.quantized)} "
        f"(in the file: {model.stored_as or dtype_name(model.file_dtype)})",
        "weights": f"{weights / 1e6:.1f} million, {size / 1e6:.1f} MB",
        "device": str(device),
        "kernels": kernels_in_words(device, prepared.attention, prepared.maxsim_name),
        "unknown keys": list(model.unknown_keys),
    }
    if check:
        in_float32_only = prepared.dtype == torch.float32 and not prepared.quantized
        is_exact = in_float32_only and config.cache_precision in ("auto", "float32")
        own = [f"as transformers reads and runs it: {model.compared}"] if model.compared else []
        own.append(f"from text to tokens, as the model's own library: {compared}")
        own += [str(finding) for finding in prepared.findings]
        del model, prepared  # the engine loads them again
        scored = _scored(config, expected, is_exact)
        rows["checked"] = [*own, f"from text to scores, as the model's own library: {scored}"]
    return {name: value for name, value in rows.items() if value}


def _expected_scores(model: LoadedModel, config: EngineConfig) -> list[float] | None:
    """Scores of the model's own library in float32, from texts; None for kinds that it does not have."""
    reader, task = model.reader, model.tasks[model.score_task]
    assert reader is not None
    scorer = reader if isinstance(reader, LibraryReader) and reader.can_score else None
    if config.dimensions is not None:  # the library's vectors have all
        scorer = None
    has_no_score = len(model.labels) > 1 or not model.has_score or model.score_task == LABEL_SCORES
    if model.listwise is not None or (model.items_have_ids and scorer is None) or has_no_score:
        return None
    limit = model.max_tokens
    prompt = config.query_prompt
    if config.instruction is not None and model.encodes_apart:
        prompt = model.query.instructed(config.instruction).prompt

    def item(reading: Reading) -> torch.Tensor:
        tokens = Tokens(reading.ids, reading.type_ids, reading.attended, None)
        assert task.reference is not None
        rows = task.reference(TokenSequence.text(0, ResultSlot(0, 0), model.score_task, tokens)).float()
        rows = after_reference(task.head)(rows)
        if model.score_task != "token_embed":
            return rows
        if not model.query.pool_first:
            return rows[1:]
        return rows if reading.scored is None else rows[torch.from_numpy(reading.scored)]

    with in_float32(model.encoders), torch.inference_mode():
        text, instruction = _QUERY, None
        if not model.encodes_apart:
            text, instruction = in_library_terms(model, config, _QUERY, None)
        if scorer is not None:
            return scorer.scores(text, _DOCUMENTS, (prompt, config.document_prompt), instruction, limit)
        if not model.encodes_apart:
            readings = [reader.pair(text, each, instruction, limit) for each in _DOCUMENTS]
            return [float(model.activation(item(each))[0, 0]) for each in readings]
        query = item(reader.text(_QUERY, "query", prompt, limit))
        readings = [reader.text(each, "document", config.document_prompt, limit) for each in _DOCUMENTS]
        pairs = np.array([(0, i) for i in range(len(readings))])
        queries, items = Ragged.from_items([query]), Ragged.from_items([item(each) for each in readings])
        return score_pairs(model.similarity, queries, items, pairs, maxsim_reference).tolist()


def _scored(config: EngineConfig, expected: list[float] | None, is_exact: bool = True) -> str:
    """Compares an engine's scores with the expected ones. Raises ModelLoadError where they differ by more
    than rounding (of float32 if `is_exact`)."""
    if expected is None:
        return "not compared: it has no such scores"
    with SyncEngine(config, progress=False) as engine:
        found = engine.score(_QUERY, list(_DOCUMENTS), truncation="cut", instruction=None).scores
    orders = [sorted(range(len(scores)), key=lambda i: -scores[i]) for scores in (found, expected)]
    off = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    spread = max(expected) - min(expected)
    named = [" ".join(str(i + 1) for i in order) for order in orders]
    order = f"the order {named[0]}" + ("" if named[0] == named[1] else f", THE LIBRARY'S {named[1]}")
    said = f"{len(found)} pairs, largest difference {off:.1e} of a spread of {spread:.2g}, {order}"
    # Rounding is relative to the scores; a precision below float32 may move them by some of their spread.
    largest = max(map(abs, expected))
    allowed = 1e-3 * largest if is_exact else max(0.02 * largest, 0.2 * spread)
    if config.doc_token_pooling is None and not off <= allowed:  # NaN, too
        name = config.model or EMBEDDED_MODEL
        raise ModelLoadError(
            f"{name!r} is not scored as its own library scores it: {said}; report this as a bug"
        )
    return said


def show(rows: dict[str, str | list[str]]) -> str:
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        for i, line in enumerate([value] if isinstance(value, str) else value):
            lines.append(f"{'' if i else name:<{width}}  {line}")
    return "\n".join(lines)


def _score(model: LoadedModel) -> str:
    if model.score_type is ScoreType.TOKEN_CLASSIFIER:
        return f"none, with {len(model.labels)} labels of tokens: {', '.join(model.labels)}"
    if (rules := model.listwise) is not None:
        return (
            "cosine of each document's marker with the query's, "
            f"up to {rules.block_documents} documents or {rules.context} tokens a pass"
        )
    if model.score_type is ScoreType.LANGUAGE_MODEL:
        return "the order by prompts that show several documents; those of labels that a request names"
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
    """Other tasks of the checkpoint."""
    if model.unread:
        files = " and ".join(model.unread)
        return f"{files}, not read: sparse, multi-vector and hybrid if pickles are allowed"
    kinds = {SPARSE_EMBED: "sparse", "embed": "bi-encoder"}
    if HYBRID_EMBED in model.tasks:
        kinds = {SPARSE_EMBED: "sparse", HYBRID_EMBED: "hybrid", "token_embed": "late-interaction", **kinds}
    elif SPARSE_EMBED not in model.tasks or model.score_task not in kinds:
        return ""
    others = [kind for task, kind in kinds.items() if task in model.tasks and task != model.score_task]
    said = f"{', '.join(others[:-1])} or " if others[1:] else ""
    return f"scored as {said}{others[-1]} too" if others else ""


def _task(model: LoadedModel, name: str) -> str:
    task = model.tasks[name]
    if task.words is not None:
        return f"pools {task.pooling}, {task.head}: weights of up to {task.words} words"
    of_labels = name in ("classify", TOKEN_CLASSIFY)
    unit = "dimensions" if not of_labels else "label" if task.dim == 1 else "labels"
    normalized = ", normalized" if task.normalized else ""
    return f"pools {task.pooling}, then {task.head}: {task.dim} {unit}{normalized}"


def _inputs(model: LoadedModel) -> dict[str, str]:
    if model.listwise is not None:
        return {"instruction": "taken" if model.instruction is None else repr(model.instruction)}
    if model.score_type is ScoreType.LANGUAGE_MODEL:
        return {"prompt": "the query and a document, one behind the other, as one text"}
    if model.score_type is ScoreType.TOKEN_CLASSIFIER:
        return {}
    if model.score_type is not ScoreType.CROSS_ENCODER:
        pooling = ""
        if model.token_pooling is not None:
            roles = " and ".join(sorted(f"{role.value}s" for role in model.token_pooling.roles))
            pooling = f"by {model.token_pooling.method.pool_factor:g}, {roles}"
        return {
            "query": _role(model.query, model.tokenizer),
            "document": _role(model.document, model.tokenizer),
            "token pooling": pooling,
            "other prompts": ", ".join(sorted(model.prompts.keys() - {"query", "document"})),
        }
    template, instruction, joined = model.pairs.template, "", "the tokenizer"
    if template is not None:
        instruction = repr(model.instruction or template.instruction or "")
        joined = f"the template of {template.source}" if template.source else "a template"
    used = {model.query.prompt, None if template is None else template.instruction}
    return {
        "pair": f"joined by {joined}, truncated by {model.pairs.truncation}",
        "query": _role(model.query, model.tokenizer) if model.query.prompt else "",
        "compression": str(model.compression or ""),
        "instruction": instruction if model.takes_instruction or not instruction else "not taken",
        "other prompts": ", ".join(sorted(name for name in model.prompts if model.prompts[name] not in used)),
    }


def _pictures(model: LoadedModel) -> str:
    """Tokens of two usual page sizes."""
    if model.vision is None:
        return ""
    reader = model.vision.reader
    pages = {f"{w} x {h}": Picture(np.zeros((h, w, 3), dtype=np.uint8)) for w, h in _PAGES}
    tokens = {size: len(reader.page(reader.read(page)).ids) for size, page in pages.items()}
    return ", ".join(f"{size} pixels are {count} tokens" for size, count in tokens.items())


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
