"""bge-m3 and models trained like it: an encoder with two layers beside it, which weigh its tokens and make a
vector of each. One pass gives dense, sparse and multi-vector embeddings. gte-multilingual-base has the first
of these layers among its weights, as the classifier of a `NewForTokenClassification`.

Sources: BGE M3, Chen et al. 2024 (arXiv 2402.03216), section 3.2, with FlagEmbedding as its reference;
mGTE, Zhang et al. 2024 (arXiv 2407.19669), and scripts/gte_embedding.py of Alibaba-NLP/gte-multilingual-base.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file

from maxsimd.engine.checkpoint.detect import weighs_words
from maxsimd.engine.checkpoint.files import CheckpointFiles, find_file, one_line
from maxsimd.engine.checkpoint.heads import Dense, ModuleHead, Normalize, linear_of
from maxsimd.engine.checkpoint.model import HYBRID_EMBED, SPARSE_EMBED, Task
from maxsimd.engine.checkpoint.reference import StatesReference
from maxsimd.engine.checkpoint.weights import files_of_tensors, refuse_not_finite, tensor_names
from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.sparse import COLUMNS, HybridHead, TokenWeights
from maxsimd.scheduler import TokenSequence

log = logging.getLogger(__name__)

SPARSE, TOKENS = "sparse_linear", "colbert_linear"
# The kinds of scores that need each of them, beside the first, which an encoder has by itself.
_NEEDED = {
    ScoreType.SPARSE: {SPARSE},
    ScoreType.LATE_INTERACTION: {TOKENS},
    ScoreType.HYBRID: {SPARSE, TOKENS},
}
_TOKEN_FEATURE = "token_embeddings"
_ALIBABA = ("NewModel", "NewForTokenClassification")
_CLASSIFIER = "classifier."


def find_layers(model: str, revision: str | None, files: CheckpointFiles) -> dict[str, Path]:
    """The files of the layers by the names of these, as they are published or converted to safetensors, or
    those of the encoder's weights."""
    if files.architecture in _ALIBABA:
        if f"{_CLASSIFIER}weight" not in tensor_names(model, revision):
            return {}
        file = files_of_tensors(model, revision)[f"{_CLASSIFIER}weight"]
        # A classifier with a single row weighs tokens; others tell kinds of tokens apart.
        return {SPARSE: file} if len(_of_classifier(file)["weight"]) == 1 else {}
    if files.architecture != "XLMRobertaModel":
        return {}
    found = {}
    for name in (SPARSE, TOKENS):
        path = find_file(model, f"{name}.safetensors", revision) or find_file(model, f"{name}.pt", revision)
        if path is not None:
            found[name] = path
    return found


def _of_classifier(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a classifier, by the rest of their names."""
    with safe_open(file, framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.startswith(_CLASSIFIER)]  # noqa: SIM118
        return {name.removeprefix(_CLASSIFIER): tensors.get_tensor(name) for name in names}


def readable(
    model: str, files: CheckpointFiles, layers: Mapping[str, Path], score_type: ScoreType, allow_pickle: bool
) -> dict[str, Path]:
    """The layers that may be read. Raises ModelLoadError if the scores need another one."""
    pickled = {name for name, path in layers.items() if path.suffix == ".pt" and not allow_pickle}
    by_words = score_type is ScoreType.SPARSE and weighs_words(files)
    needed = set() if by_words else _NEEDED.get(score_type, set())
    if layers and needed & pickled:
        raise ModelLoadError(
            f"{model!r} has {_named(needed & pickled)} for {score_type.value} scores; pickles are read with "
            "allow_pickle=True (weights alone), or convert them to safetensors"
        )
    # Any encoder can be scored by its tokens' states; with a layer of bge-m3's it was not trained for that.
    if (_beside(layers) or score_type is not ScoreType.LATE_INTERACTION) and needed - layers.keys():
        others = "; or name a SparseEncoder save or a *ForMaskedLM" if score_type is ScoreType.SPARSE else ""
        raise ModelLoadError(
            f"{model!r} has no {_named(needed - layers.keys())}, which {score_type.value} scores of an "
            f"encoder need{others}"
        )
    if pickled:
        log.info(
            "%s beside the model are not read: they give sparse and multi-vector embeddings and hybrid "
            "scores with allow_pickle",
            _named(pickled),
        )
    return {name: path for name, path in layers.items() if name not in pickled}


def _beside(layers: Mapping[str, Path]) -> set[str]:
    """The layers that are in files of their own."""
    return {name for name, file in layers.items() if file.stem == name}


def with_layers(
    path: str, parts: dict[str, Any], layers: Mapping[str, Path], score_type: ScoreType
) -> dict[str, Any]:
    """The parts of a bi-encoder with all that its layers add: more embeddings, and kinds of scores."""
    if not layers:
        return parts
    tasks = dict(parts["tasks"])
    backbone, tokenizer = parts["backbone"], parts["tokenizer"]
    hidden = backbone.config.hidden_size
    device = next(backbone.parameters()).device
    made = {name: _layer(path, name, file, hidden).to(device) for name, file in layers.items()}
    if TOKENS in made:
        if tasks["embed"].pooling not in ("cls", "last"):
            raise ModelLoadError(
                f"{path!r} has {layers[TOKENS].name}, which leaves the first token out, and pools "
                f"{tasks['embed'].pooling}, which does not; move that file away, or correct the pooling"
            )
        head = ModuleHead([made[TOKENS], Normalize()], _TOKEN_FEATURE)
        reference = StatesReference(backbone, tokenizer, head)
        tasks["token_embed"] = Task("all", head, made[TOKENS].linear.out_features, True, reference)
    if SPARSE in made:
        # FlagEmbedding gives these no weight.
        ids = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        weightless = np.array(sorted({each for each in ids if each is not None}), dtype=np.int64)
        words = None if _beside(layers) else _words(tokenizer, weightless)
        weights = _WeightsHead(made[SPARSE], weightless, words)
        of_weights = _WeightsReference(backbone, tokenizer, weights)
        tasks[SPARSE_EMBED] = Task("token-weights", weights, COLUMNS, False, of_weights, words=len(tokenizer))
    if len(made) == 2:
        dense = tasks["embed"]
        as_long = dense.dim == tasks["token_embed"].dim == hidden
        if as_long and dense.pooling == "cls" and dense.normalized:
            hybrid = _HybridHead(dense.head, tasks["token_embed"].head, weights)
            of_all = _HybridReference(backbone, tokenizer, hybrid)
            tasks[HYBRID_EMBED] = Task("hybrid", hybrid, hidden + COLUMNS, False, of_all)
    scored = {}
    if score_type is ScoreType.SPARSE:
        scored = {"score_task": SPARSE_EMBED, "similarity": "sparse"}
    elif score_type is ScoreType.LATE_INTERACTION and TOKENS in made:
        scored = {"score_task": "token_embed", "similarity": "meanmaxsim"}
    elif score_type is ScoreType.HYBRID:
        if HYBRID_EMBED not in tasks:
            raise ModelLoadError(
                f"{path!r} cannot be scored in a hybrid way: its dense vectors must be normalized first "
                "tokens, and as long as the vectors of its tokens"
            )
        scored = {"score_task": HYBRID_EMBED, "similarity": "hybrid"}
    parts = parts | {"tasks": tasks} | scored
    if TOKENS in made:
        # The first token stands for the whole text, and is no vector among those of tokens.
        parts |= {role: replace(parts[role], pool_first=False) for role in ("query", "document", "text")}
    return parts


def _named(layers: set[str]) -> str:
    return " and ".join(sorted(layers))


def _layer(path: str, name: str, file: Path, hidden: int) -> Dense:
    """One of the layers, float32. A pickle is opened as weights alone, which runs no code."""
    try:
        if file.suffix == ".pt":
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        else:
            tensors = load_file(file) if file.stem == name else _of_classifier(file)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    except Exception as error:
        raise ModelLoadError(f"cannot read {file.name} of {path!r}: {one_line(error)}") from error
    size = 1 if name == SPARSE else sum(shapes.get("bias", ())[:1])
    wanted = {"weight": (size, hidden), "bias": (size,)}
    if shapes != wanted or size == 0:
        raise ModelLoadError(
            f"{file.name} of {path!r} has the tensors {shapes}, not a weight and a bias for {hidden} numbers"
        )
    refuse_not_finite(path, [(f"{file.name}/{key}", tensor) for key, tensor in tensors.items()])
    activation = torch.nn.ReLU() if name == SPARSE else torch.nn.Identity()
    return Dense(linear_of(**tensors), activation, use_residual=False)


def _words(tokenizer: Any, weightless: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each token the first that is written as it is, since Alibaba's weights are those of decoded tokens:
    a word is the same with a space before it and without."""
    words = np.arange(len(tokenizer), dtype=np.int64)
    first: dict[str, int] = {}
    for token in np.setdiff1d(words, weightless).tolist():
        words[token] = first.setdefault(tokenizer.decode([token]), token)
    return words


class _WeightsHead(ModuleHead, TokenWeights):
    def __init__(self, layer: Dense, weightless: NDArray[np.int64], words: NDArray[np.int64] | None) -> None:
        super().__init__([layer], _TOKEN_FEATURE)
        self.weightless, self.words = weightless, words

    def __str__(self) -> str:
        return f"{SPARSE} and relu"


class _HybridHead(ModuleHead, HybridHead):
    def __init__(self, dense: Any, tokens: Any, weights: _WeightsHead) -> None:
        super().__init__([*dense.modules, *tokens.modules, *weights.modules], _TOKEN_FEATURE)
        self._dense, self._tokens, self._weights = dense, tokens, weights
        self.weightless = weights.weightless

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._tokens(rows), self._weights(rows)], dim=1)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self._dense(rows)
        return vectors

    def __str__(self) -> str:
        return f"{TOKENS}, {SPARSE} and the dense vector"


class _WeightsReference(StatesReference):
    """Each token's greatest weight by ascending id, [entries, 1], plainly."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        weights: torch.Tensor = self._head(self._states(sequence))[:, 0]
        greatest: dict[int, torch.Tensor] = {}
        for own, weight in zip(sequence.tokens.ids.tolist(), weights, strict=True):
            token = own if self._head.words is None else int(self._head.words[own])
            if token not in self._head.weightless:
                greatest[token] = torch.maximum(greatest.get(token, weight), weight)
        if not greatest:
            return weights.new_empty(0, 1)
        return torch.stack([greatest[token] for token in sorted(greatest)])[:, None]


class _HybridReference(StatesReference):
    """The vector of each token, the first that of the whole text, and at the first of each id its greatest
    weight, [tokens, dim + 1], plainly."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        hidden = self._states(sequence)
        made: torch.Tensor = self._head(hidden).clone()
        made[:1, :-1] = self._head.whole(hidden[:1])
        ids = sequence.tokens.ids.tolist()
        weights = torch.zeros(len(ids), device=made.device, dtype=torch.float32)
        for token in set(ids) - set(self._head.weightless.tolist()):
            at = [i for i, each in enumerate(ids) if each == token]
            weights[at[0]] = made[at, -1].max()
        made[:, -1] = weights
        return made
