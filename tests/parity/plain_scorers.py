"""Scores of encoders with code of their own, from the plain readings of that code."""

import json
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tests.parity.plain_encoders import (
    PlainEncoder,
    States,
    flash_states,
    jina_bert_states,
    new_states,
    nomic_moe_states,
)

Scores = NDArray[np.float32]


@lru_cache(maxsize=4)
def _loaded(path: str, prefix: str) -> PlainEncoder:
    return PlainEncoder(path, prefix)


class PlainBiEncoder:
    """Scores by the cosine of what a pooling makes of the states: the first token or the mean."""

    def __init__(
        self,
        states: States,
        prefix: str,
        pooling: str,
        *,
        normalized: bool = True,
        prompts: dict[str, str] | None = None,
    ) -> None:
        self._states, self._prefix, self._pooling = states, prefix, pooling
        self._prompts = prompts or {}
        self._normalized = normalized

    @torch.inference_mode()
    def embeddings(self, path: str, texts: Sequence[str], role: str) -> list[Scores]:
        """The embedding of each text, [hidden]."""
        model = _loaded(path, self._prefix)
        prompt = self._prompts.get(role, "")
        made = []
        for text in texts:
            ids, types = _inputs(model, f"{prompt}{text}")
            states = self._states(model, ids, types)
            pooled = states[0] if self._pooling == "cls" else states.mean(dim=0)
            made.append((F.normalize(pooled, dim=-1) if self._normalized else pooled).numpy())
        return made

    def __call__(self, path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
        both = (self.embeddings(path, queries, "query"), self.embeddings(path, documents, "document"))
        first, second = (torch.from_numpy(np.stack(each)) for each in both)
        return F.cosine_similarity(first, second).numpy()


Head = Callable[[PlainEncoder, torch.Tensor], torch.Tensor]


class PlainCrossEncoder:
    """Scores by the probability that a head on the first token's state gives."""

    def __init__(self, states: States, prefix: str, head: Head) -> None:
        self._states, self._prefix, self._head = states, prefix, head

    @torch.inference_mode()
    def __call__(self, path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
        model = _loaded(path, self._prefix)
        logits = [
            self._head(model, self._states(model, *_inputs(model, *pair))[0])
            for pair in zip(queries, documents, strict=True)
        ]
        return torch.cat(logits).sigmoid().numpy()


class PlainColbert:
    """Scores by the sum over query tokens of their greatest cosine with a document's tokens, as Stanford
    ColBERT makes these: a marker behind [CLS], queries filled up with [MASK], which no token attends to, and
    documents without punctuation."""

    def __init__(self, states: Callable[..., torch.Tensor], prefix: str) -> None:
        self._states, self._prefix = states, prefix

    @torch.inference_mode()
    def embeddings(self, path: str, texts: Sequence[str], role: str) -> list[Scores]:
        """The embeddings of each text's tokens, [tokens, dim]."""
        model = _loaded(path, self._prefix)
        metadata = json.loads(Path(path, "artifact.metadata").read_text(encoding="utf-8"))
        is_query = role == "query"
        longest = metadata["query_maxlen" if is_query else "doc_maxlen"]
        word = model.tokenizer.token_to_id
        marker = word(metadata["query_token_id" if is_query else "doc_token_id"])
        punctuation = {word(character) for character in string.punctuation}
        made = []
        for text in texts:
            inner = model.tokenizer.encode(text, add_special_tokens=False).ids[: longest - 3]
            ids = [word("[CLS]"), marker, *inner, word("[SEP]")]
            attended = len(ids)
            ids += [word("[MASK]")] * (longest - len(ids) if is_query else 0)
            tensor = torch.tensor(ids)
            states = self._states(model, tensor, torch.zeros_like(tensor), attended)
            if not is_query:
                states = states[[i for i, token in enumerate(ids) if token not in punctuation]]
            made.append(F.normalize(model.linear(states, "linear"), dim=-1).numpy())
        return made

    def __call__(self, path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
        both = (self.embeddings(path, queries, "query"), self.embeddings(path, documents, "document"))
        return np.array(
            [(query @ document.T).max(axis=1).sum() for query, document in zip(*both, strict=True)]
        )


def pooler_head(model: PlainEncoder, first: torch.Tensor) -> torch.Tensor:
    """BERT's: a linear layer, tanh, and one logit."""
    return model.linear(torch.tanh(model.linear(first, "pooler.dense")), "classifier")


def roberta_head(model: PlainEncoder, first: torch.Tensor) -> torch.Tensor:
    """RoBERTa's: the same, under other names."""
    return model.linear(torch.tanh(model.linear(first, "classifier.dense")), "classifier.out_proj")


def _inputs(model: PlainEncoder, *texts: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and types of a text or a pair, [tokens] each; pairs and texts that are too long are cut."""
    encoded = model.tokenizer.encode(*texts)
    return torch.tensor(encoded.ids), torch.tensor(encoded.type_ids)


@torch.inference_mode()
def gte_sparse(path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
    """gte-multilingual-base as its card has it: the products of the weights of the words that are in both."""
    scores = []
    for query, document in zip(queries, documents, strict=True):
        asked, there = gte_weights(path, query), gte_weights(path, document)
        scores.append(sum(weight * there.get(word, 0.0) for word, weight in asked.items()))
    return np.array(scores, dtype=np.float32)


def gte_weights(path: str, text: str) -> dict[str, float]:
    """The greatest weight of each word, a word being what a token is decoded as."""
    model = _loaded(path, "new.")
    ids, types = _inputs(model, text)
    weights = model.linear(new_states(model, ids, types), "classifier").relu()[:, 0]
    left_out = {model.tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<pad>", "<unk>")}
    greatest: dict[str, float] = {}
    for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if token not in left_out and weight > 0:
            word = model.tokenizer.decode([token], skip_special_tokens=False)
            greatest[word] = max(weight, greatest.get(word, 0.0))
    return greatest


GTE_MULTILINGUAL = PlainBiEncoder(new_states, "new.", "cls")
SNOWFLAKE = PlainBiEncoder(new_states, "", "cls", prompts={"query": "query: "})
GTE_ENGLISH = PlainBiEncoder(new_states, "new.", "cls", normalized=False)
GTE_RERANKER = PlainCrossEncoder(new_states, "new.", pooler_head)
JINA_EMBEDDINGS_V2 = PlainBiEncoder(jina_bert_states, "", "mean", normalized=False)
JINA_COLBERT_V1 = PlainColbert(jina_bert_states, "bert.")
JINA_RERANKER_V1 = PlainCrossEncoder(jina_bert_states, "bert.", pooler_head)
JINA_RERANKER_V2 = PlainCrossEncoder(flash_states, "roberta.", roberta_head)
NOMIC_V2_MOE = PlainBiEncoder(
    nomic_moe_states,
    "",
    "mean",
    prompts={"query": "search_query: ", "document": "search_document: "},
)
