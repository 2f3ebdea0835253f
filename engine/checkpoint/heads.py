"""Heads: what is done with pooled rows. Each maps float32 [n, hidden] to float32 [n, dim]."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as ModelOutput

from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.methods import Head


class ModuleHead:
    """sentence-transformers' own modules (Dense, Normalize, ...) applied one after the other.

    `feature` is the name under which they pass the rows on: sentence_embedding or token_embeddings."""

    def __init__(self, modules: Sequence[torch.nn.Module], feature: str) -> None:
        self.modules = [module.float() for module in modules]
        self._feature = feature

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        features = {self._feature: rows}
        for module in self.modules:
            features = module(features)
        return features[self._feature]

    def __str__(self) -> str:
        return " and ".join(type(module).__name__ for module in self.modules) or "nothing"


class ClassifierHead:
    """The head of a transformers `*ForSequenceClassification` model, run by the model's own code.

    The model is called with its backbone replaced by one that returns the pooled rows as sequences of one
    token, so that whatever the family does after its backbone is done here too."""

    def __init__(self, model: Any) -> None:
        prefix = model.base_model_prefix
        backbone = getattr(model, prefix)
        # A shallow copy shares every weight but has a module table of its own.
        self._model = copy.copy(model)
        self._model._modules = dict(model._modules)
        pooler = getattr(backbone, "pooler", None)
        self._rows = _GivenRows(pooler.float() if pooler is not None else None)
        self._model._modules[prefix] = self._rows
        for name, module in self._model._modules.items():
            if name != prefix and module is not None:
                module.float()
        pad = getattr(model.config, "pad_token_id", None) or 0
        self._token_id = pad + 1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) == 0:
            return rows.new_empty(0, self._model.config.num_labels)
        self._rows.rows = rows[:, None, :]  # [n, 1, hidden]
        input_ids = torch.full((len(rows), 1), self._token_id, device=rows.device)
        try:
            logits: torch.Tensor = self._model(input_ids=input_ids).logits
        finally:
            self._rows.rows = None
        return logits.float()  # [n, labels]

    def __str__(self) -> str:
        return f"the head of {type(self._model).__name__}"


class TokenLogitsHead:
    """The logits of one or two words, from their rows of a language model's output matrix and no others.

    Two words give logit(first) - logit(second), whose sigmoid is the softmax over the two; one gives its
    logit."""

    def __init__(self, model: Any, words: Sequence[int], names: Sequence[str]) -> None:
        output = model.get_output_embeddings()
        index = torch.tensor(words, device=output.weight.device)
        self._rows = output.weight.detach()[index].float()  # [words, hidden]
        bias = getattr(output, "bias", None)
        self._bias = bias.detach()[index].float() if bias is not None else None
        config = model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._model = model
        self._words = index
        self._names = tuple(names)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(rows, self._rows, self._bias)  # [n, words]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits[:, :1] - logits[:, 1:].sum(dim=-1, keepdim=True)  # [n, 1]

    def __str__(self) -> str:
        return " - ".join(f"logit of {name!r}" for name in self._names)

    @torch.inference_mode()
    def check(self, path: str) -> None:
        """Compares with the model's own logits of a few tokens, and lets go of the output matrix.

        Raises ModelLoadError for a model that does more to its logits than is done here."""
        model, self._model = self._model, None
        ids = torch.arange(1, 9, device=self._rows.device)[None] % model.config.get_text_config().vocab_size
        hidden = model.base_model(input_ids=ids).last_hidden_state[:, -1].float()
        logits = model(input_ids=ids, logits_to_keep=1).logits[0, -1, self._words].float()
        ours = self(hidden)[0, 0]
        expected = logits[0] - logits[1:].sum()
        scale = max(1.0, float(logits.abs().max()))
        tolerance = 1e-3 if hidden.dtype == model.dtype else 0.05
        if not abs(float(ours - expected)) <= tolerance * scale:
            raise ModelLoadError(f"{path!r} does something to its logits that is not supported")


class FirstColumns:
    """Another head's rows with only so many columns, normalised again where they were.

    Source: matryoshka embeddings, Kusupati et al. 2022 (arXiv 2205.13147)."""

    def __init__(self, head: Head, dimensions: int, normalised: bool) -> None:
        self.inner = head
        self.dimensions = dimensions
        self.normalised = normalised

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        kept = self.inner(rows)[:, : self.dimensions]
        return torch.nn.functional.normalize(kept, dim=-1) if self.normalised else kept

    def __str__(self) -> str:
        return f"{self.inner} and the first columns"


def head_tensors(head: Head) -> list[tuple[str, torch.Tensor]]:
    """The weights of a head that makes embeddings, by name."""
    if isinstance(head, FirstColumns):
        return head_tensors(head.inner)
    modules = head.modules if isinstance(head, ModuleHead) else []
    return [
        (f"{i}.{name}", tensor)
        for i, module in enumerate(modules)
        for name, tensor in module.state_dict().items()
    ]


class _GivenRows(torch.nn.Module):
    """Stands in for a backbone: returns the rows it was given, and the family's pooler over them."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self._pooler = pooler
        self.rows: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        pooled = self._pooler(self.rows) if self._pooler is not None else None
        return ModelOutput(last_hidden_state=self.rows, pooler_output=pooled)
