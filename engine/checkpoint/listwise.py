"""Loads listwise rerankers: jina-reranker-v3, which scores many documents in one pass.

Source: "jina-reranker-v3: Last but Not Late Interaction for Document Reranking", arXiv 2509.25085, and the
model card, whose custom code is a Qwen3 with a projection of two layers.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3Model

from maxsimd.engine.checkpoint.fit import refuse_not_finite
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import ListwiseRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import TokenizerReader
from maxsimd.engine.checkpoint.reference import HiddenStatesReference
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.errors import ModelLoadError

_QUERY_MARKER, _DOCUMENT_MARKER = "<|rerank_token|>", "<|embed_token|>"


def load_listwise(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the backbone with transformers and the projection beside it.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    revision = options["revision"]
    # The published code is not needed: its backbone is transformers' Qwen3, and the projection is below.
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    backbone = Qwen3Model.from_pretrained(path, config=config, revision=revision, **options["model_kwargs"])
    projection = read_tensors(path, revision, "projector.")
    refuse_not_finite(path, [(f"projector.{name}", tensor) for name, tensor in projection.items()])
    head = ModuleHead(
        [_Projection(projection, path, config.hidden_size).to(options["device"])], "token_embeddings"
    )
    for marker in (_QUERY_MARKER, _DOCUMENT_MARKER):
        if tokenizer.convert_tokens_to_ids(marker) in (None, tokenizer.unk_token_id):
            raise ModelLoadError(f"the tokeniser of {path!r} lacks the marker {marker}")
    dim = projection["2.weight"].shape[0]
    context = min(int(tokenizer.model_max_length), config.max_position_embeddings)
    return {
        "backbone": backbone.to(options["device"]),
        "tokenizer": tokenizer,
        "tasks": {"rank": Task("all", head, dim, False, HiddenStatesReference(backbone, tokenizer, head))},
        "score_task": "rank",
        "query": RoleRules(),
        "document": RoleRules(),
        "activation": torch.nn.Identity(),
        "listwise": ListwiseRules(_QUERY_MARKER, _DOCUMENT_MARKER, context),
        "reader": TokenizerReader(tokenizer),
    }


class _Projection(torch.nn.Module):
    """Linear, ReLU, linear, without biases: maps hidden states at markers to the space in which they are
    compared."""

    def __init__(self, tensors: dict[str, torch.Tensor], path: str, hidden: int) -> None:
        super().__init__()
        if tensors.keys() != {"0.weight", "2.weight"}:
            different = ", ".join(
                f"projector.{name}" for name in sorted(tensors.keys() ^ {"0.weight", "2.weight"})
            )
            raise ModelLoadError(
                f"{path!r} has another projector than jina-reranker-v3: it differs in {different}"
            )
        first, second = tensors["0.weight"], tensors["2.weight"]
        if (first.ndim, second.ndim, first.shape[-1], second.shape[-1]) != (2, 2, hidden, first.shape[0]):
            raise ModelLoadError(
                f"{path!r} has a projector that does not fit: projector.0.weight {list(first.shape)} behind "
                f"{hidden} dimensions, then projector.2.weight {list(second.shape)}"
            )
        self.first = torch.nn.Linear(hidden, first.shape[0], bias=False, device="meta")
        self.second = torch.nn.Linear(first.shape[0], second.shape[0], bias=False, device="meta")
        self.first.weight = torch.nn.Parameter(first, requires_grad=False)
        self.second.weight = torch.nn.Parameter(second, requires_grad=False)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = features["token_embeddings"]
        projected = self.second(torch.relu(self.first(rows)))
        return features | {"token_embeddings": projected}
