"""Heads: the computation on pooled rows. Each maps float32 [n, hidden] to float32 [n, dim]."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from maxsimd.pooling.methods import Head

# The number of random rows for which a shorter way must give the same.
_TRIED_ROWS = 5


class Dense(nn.Module):
    """A linear layer and an activation, as in sentence-transformers. With `use_residual` the input is added
    to the output, through `residual` where their sizes differ."""

    def __init__(
        self, linear: nn.Linear, activation: nn.Module, use_residual: bool, residual: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.linear = linear
        self.activation_function = activation
        self.use_residual = use_residual
        if residual is not None:
            self.residual = residual

    def extra_repr(self) -> str:
        return "use_residual" if self.use_residual else ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation_function(self.linear(rows))
        if self.use_residual:
            out = out + (self.residual(rows) if hasattr(self, "residual") else rows)
        return out


class Normalize(nn.Module):
    """L2 normalization of each row."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(rows, p=2, dim=-1)


class LayerNorm(nn.Module):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(rows)
        return normalized


class _FeatureModules(nn.Module):
    """sentence-transformers' modules of another kind, which each take and return a dictionary of features."""

    def __init__(self, modules: Sequence[nn.Module], feature: str, result: str) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self._feature, self._result = feature, result

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        features = {self._feature: rows}
        for module in self.inner:
            features = module(features)
        return features[self._result]


def _on_rows(module: Any, feature: str, result: str) -> nn.Module | None:
    """One of sentence-transformers' modules as a module that maps rows of a `feature` to those of a `result`,
    with the same weights; None for another kind."""
    if not type(module).__module__.startswith("sentence_transformers."):
        return module if isinstance(module, Dense | Normalize | LayerNorm | nn.Identity) else None
    names = (getattr(module, "module_input_name", feature), getattr(module, "module_output_name", result))
    fits = names == (feature, result)
    match type(module).__name__:
        case "Dense" if fits:
            residual = getattr(module, "residual", None)
            return Dense(module.linear, module.activation_function, module.use_residual, residual)
        case "Normalize" if fits:
            return Normalize()
        case "LayerNorm" if feature == result == "sentence_embedding":
            return LayerNorm(module.norm)
        case "Dropout" if feature == result:
            return nn.Identity()
    return None


class ModuleHead:
    """Modules applied to rows one after the other: ours, or sentence-transformers', which pass rows on under
    the name `feature`. The last one may name its `result` otherwise."""

    def __init__(self, modules: Sequence[nn.Module], feature: str, result: str | None = None) -> None:
        result = result or feature
        results = [feature] * (len(modules) - 1) + [result]
        ours = [_on_rows(module, feature, made) for module, made in zip(modules, results, strict=False)]
        self.modules = [module for module in ours if module is not None]
        if len(self.modules) < len(ours):
            self.modules = [_FeatureModules(modules, feature, result)]
        for module in self.modules:
            module.float().eval()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        for module in self.modules:
            rows = module(rows)
        return rows

    def __str__(self) -> str:
        first = self.modules[0] if self.modules else None
        modules = first.inner if isinstance(first, _FeatureModules) else self.modules
        return " and ".join(type(module).__name__ for module in modules) or "nothing"


class ClassifierHead:
    """The head of a transformers `*ForSequenceClassification` model, run by the model's own code, in which a
    module that returns the pooled rows as sequences of one token replaces the backbone."""

    def __init__(self, model: Any) -> None:
        self._rows = GivenRows(_pooler_of(model.base_model), getattr(model, "output_type", None))
        self.model = self._rows.in_place_of_backbone(model)
        self.pad_id: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)
        if self.pad_id is None:
            # Families that look for the last token refuse several rows where there is no padding token.
            self.model.config = copy.deepcopy(model.config)
            for config in (self.model.config, self.model.config.get_text_config()):
                config.pad_token_id = 0
        self._token_id = (self.pad_id or 0) + 1
        self._is_short = self._gives_the_same_in_short()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) == 0:
            return rows.new_empty(0, self.model.config.num_labels)
        return self._in_short(rows) if self._is_short else self._by_model(rows)

    @torch.inference_mode()
    def passes_over_padding(self) -> bool:
        """Whether the family's code reads the last token that is not the padding token, whatever the mask
        says. Tried with a sequence of three rows."""
        if self.pad_id is None:
            return False
        config = self.model.config.get_text_config()
        try:
            device = next(self.model.parameters()).device
            ids = torch.tensor([[self._token_id, self._token_id, self.pad_id]], device=device)
            # OPT's states may be narrower.
            rows = _random_rows(3, getattr(config, "word_embed_proj_dim", None) or config.hidden_size)
            rows = rows.to(device)
            logits = self._rows.logits(self.model, ids, rows[None])
            return torch.allclose(logits, self._by_model(rows)[1:2], atol=1e-5)
        except Exception:  # the family's classifier takes something else, or its states have no one width
            return False

    def _by_model(self, rows: torch.Tensor) -> torch.Tensor:
        ids = torch.full((len(rows), 1), self._token_id, device=rows.device)
        return self._rows.logits(self.model, ids, rows[:, None, :])  # [n, labels]

    def _in_short(self, rows: torch.Tensor) -> torch.Tensor:
        """The family's pooler and classifier alone. For one row the rest of the model's code takes longer."""
        states = rows[:, None, :]  # [n, 1, hidden]
        pooler = self._rows.pooler
        logits: torch.Tensor = self.model.classifier(states if pooler is None else pooler(states))
        return logits

    def _gives_the_same_in_short(self) -> bool:
        """Whether the short way has the bits of the model's code for random rows."""
        classifier: Any = getattr(self.model, "classifier", None)
        weights = [] if classifier is None else list(classifier.parameters())
        if not weights or weights[0].device.type != "cpu" or self.model.training:
            return False
        rows = _random_rows(_TRIED_ROWS, self.model.config.get_text_config().hidden_size)
        try:
            with torch.inference_mode():
                return torch.equal(self._in_short(rows), self._by_model(rows))
        except Exception:  # the family's classifier takes something else, or its states have no one width
            return False

    def __str__(self) -> str:
        return f"the head of {type(self.model).__name__}"


class TokenClassifierHead(ClassifierHead):
    """The head of a transformers `*ForTokenClassification` model, which maps each row by itself."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return super().__call__(rows).flatten(0, -2)  # [n, labels]


def _random_rows(count: int, hidden: int) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A linear layer of these weights, in float32."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return linear


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The logits, kept within `softcap` by a tanh where there is one."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class TokenLogitsHead(torch.nn.Module):
    """The logits of one or two words, from their rows of a language model's output matrix and no others.

    Two words give logit(first) - logit(second), whose sigmoid is the softmax over the two; one gives its
    logit."""

    def __init__(self, model: Any, words: list[int], names: Sequence[str]) -> None:
        super().__init__()
        output = model.get_output_embeddings()
        bias = getattr(output, "bias", None)
        self.output = linear_of(output.weight[words], None if bias is None else bias[words])
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._names = tuple(names)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = capped(self.output(rows), self._softcap)  # [n, words]
        score: torch.Tensor = logits[:, :1] - logits[:, 1:].sum(dim=-1, keepdim=True)  # [n, 1]
        return score

    def __str__(self) -> str:
        return " - ".join(f"logit of {name!r}" for name in self._names)


class FirstColumns:
    """The first `dimensions` columns of another head's rows, normalized again if the rows were.

    Source: matryoshka embeddings, Kusupati et al. 2022 (arXiv 2205.13147)."""

    def __init__(self, head: Head, dimensions: int, normalized: bool) -> None:
        self.inner = head
        self.dimensions = dimensions
        self.normalized = normalized

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.shorten(self.inner(rows))

    def shorten(self, rows: torch.Tensor) -> torch.Tensor:
        """The first columns of the other head's rows."""
        first = rows[:, : self.dimensions]
        return torch.nn.functional.normalize(first, dim=-1) if self.normalized else first

    def __str__(self) -> str:
        return f"{self.inner} and the first columns"


def head_tensors(head: Head) -> list[tuple[str, torch.Tensor]]:
    """The weights of a head that makes embeddings, by name."""
    return [
        (f"{i}.{name}", tensor)
        for i, module in enumerate(modules_of(head))
        for name, tensor in module.state_dict().items()
    ]


class _ActivatedPooler(torch.nn.Module):
    """ALBERT's pooler, whose activation is a module of the backbone and not of the pooler."""

    def __init__(self, linear: torch.nn.Module, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.activation(self.linear(rows[:, 0]))
        return pooled


def _pooler_of(backbone: Any) -> torch.nn.Module | None:
    """The module that maps hidden states [n, tokens, hidden] to the `pooler_output`, if there is one."""
    pooler = getattr(backbone, "pooler", None)
    activation = getattr(backbone, "pooler_activation", None)
    return pooler if pooler is None or activation is None else _ActivatedPooler(pooler, activation)


class GivenRows(torch.nn.Module):
    """Replaces a backbone: returns the rows that it was given, and the family's pooler's output for them, as
    an `output_type`: by default transformers' own."""

    def __init__(self, pooler: torch.nn.Module | None, output_type: Callable[..., Any] | None = None) -> None:
        super().__init__()
        if output_type is None:
            from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

            output_type = BaseModelOutputWithPoolingAndCrossAttentions
        self.pooler = pooler
        self.rows: torch.Tensor | None = None
        self._output_type = output_type

    def in_place_of_backbone(self, model: Any) -> Any:
        """A shallow copy of a model, with this in place of its backbone and all else in float32. It shares
        every weight but has a module table of its own."""
        copied = copy.copy(model)
        copied._modules = model._modules | {model.base_model_prefix: self}
        for module in copied._modules.values():
            if module is not None:
                module.float()
        return copied

    def logits(self, model: Any, input_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits that a model with this in place of its backbone makes of hidden states [n, tokens,
        hidden], float32."""
        self.rows = rows
        try:
            logits: torch.Tensor = model(input_ids=input_ids).logits
        finally:
            self.rows = None
        return logits.float()

    def forward(self, *args: object, **kwargs: object) -> Any:
        pooled = self.pooler(self.rows) if self.pooler is not None else None
        return self._output_type(last_hidden_state=self.rows, pooler_output=pooled)


def modules_of(head: Head) -> list[torch.nn.Module]:
    """The modules that hold a head's layers."""
    match head:
        case FirstColumns():
            return modules_of(head.inner)
        case ModuleHead():
            return list(head.modules)
        case ClassifierHead():
            return [head.model]
        case torch.nn.Module():
            return [head]
    return []


def after_reference(head: Head) -> Head:
    """The part of a head that follows its reference: taking the first columns, if it does so."""
    return head.shorten if isinstance(head, FirstColumns) else torch.nn.Identity()
