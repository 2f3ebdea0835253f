"""Loads listwise rerankers: jina-reranker-v3, which scores many documents in one pass.

Source: "jina-reranker-v3: Last but Not Late Interaction for Document Reranking", arXiv 2509.25085, and the
model card, whose custom code is a Qwen3 with a projection of two layers.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3Model

from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import ListwiseRules, RoleRules, Task
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.errors import ModelLoadError

_QUERY_MARKER, _DOCUMENT_MARKER = "<|rerank_token|>", "<|embed_token|>"


def load_listwise(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the backbone with transformers and the projection beside it.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    revision = options["revision"]
    # The published code is not needed: its backbone is transformers' Qwen3, and the rest is here.
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    backbone = Qwen3Model.from_pretrained(path, config=config, revision=revision, **options["model_kwargs"])
    projection = read_tensors(path, revision, "projector.")
    head = ModuleHead([_Projection(projection, path).to(options["device"])], "token_embeddings")
    for marker in (_QUERY_MARKER, _DOCUMENT_MARKER):
        if tokenizer.convert_tokens_to_ids(marker) in (None, tokenizer.unk_token_id):
            raise ModelLoadError(f"the tokeniser of {path!r} lacks the marker {marker}")
    dim = projection["2.weight"].shape[0]
    context = min(int(tokenizer.model_max_length), config.max_position_embeddings)
    return {
        "backbone": backbone.to(options["device"]),
        "tokenizer": tokenizer,
        "tasks": {"rank": Task("all", head, dim, False)},
        "score_task": "rank",
        "query": RoleRules(),
        "document": RoleRules(),
        "activation": torch.nn.Identity(),
        "listwise": ListwiseRules(_QUERY_MARKER, _DOCUMENT_MARKER, context),
    }


class _Projection(torch.nn.Module):
    """Linear, ReLU, linear, without biases: hidden states at markers to the space they are compared in."""

    def __init__(self, tensors: dict[str, torch.Tensor], path: str) -> None:
        super().__init__()
        if set(tensors) != {"0.weight", "2.weight"}:
            raise ModelLoadError(f"{path!r} has a projector of another shape than jina-reranker-v3's")
        self.first = torch.nn.Parameter(tensors["0.weight"], requires_grad=False)
        self.second = torch.nn.Parameter(tensors["2.weight"], requires_grad=False)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = features["token_embeddings"]
        projected = torch.relu(rows @ self.first.T) @ self.second.T
        return features | {"token_embeddings": projected}
