"""The head of a masked language model, as SPLADE uses it: a logit for every word of the vocabulary."""

import copy
from typing import Any

import torch

from maxsimd.engine.checkpoint.heads import GivenRows
from maxsimd.pooling.sparse import WordsHead
from maxsimd.scheduler import Role


class MaskedWordsHead(torch.nn.Module, WordsHead):
    """What a transformers `*ForMaskedLM` model does after its backbone, by the model's own code: rows
    [n, hidden] to logits [n, words], float32. A logit weighs log(1 + relu(logit)), of which another
    log(1 + weight) is taken where `twice`.

    Sources: SPLADE, Formal et al. 2021 (arXiv 2107.05720), eq. 1; Geng et al. 2024 (arXiv 2411.04403) for
    the second logarithm."""

    def __init__(self, model: Any, *, twice: bool, most: int | None) -> None:
        super().__init__()
        backbone = model.base_model
        untie(model, backbone)
        # A shallow copy shares every weight but has a module table of its own.
        words: Any = copy.copy(model)
        words._modules = dict(model._modules)
        self._rows = GivenRows(None)
        words._modules[model.base_model_prefix] = self._rows
        for module in words._modules.values():
            module.float()
        self.words = words
        self.most = most
        self._twice = twice
        device = next(backbone.parameters()).device
        with torch.inference_mode():
            hidden = model.config.get_text_config().hidden_size
            self.num_words = self.forward(torch.zeros(1, hidden, device=device)).shape[1]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._rows.rows = rows[:, None, :]  # [n, 1, hidden]
        input_ids = torch.ones(len(rows), 1, dtype=torch.long, device=rows.device)
        try:
            logits: torch.Tensor = self.words(input_ids=input_ids).logits
        finally:
            self._rows.rows = None
        return logits[:, 0].float()  # [n, words]

    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        weights = numbers.relu().log1p()
        return weights.log1p() if self._twice else weights

    def look_up(self, weights: torch.Tensor, roles: frozenset[Role]) -> None:
        """Has texts in these roles not read, but looked up in `weights` [words]."""
        self.static_weights = weights.detach().float().clone()
        self.static_roles = roles

    def __str__(self) -> str:
        logarithm = "log(1 + log(1 + relu))" if self._twice else "log(1 + relu)"
        most = "" if self.most is None else f", at most {self.most}"
        return f"the head of {type(self.words).__name__} and {logarithm}{most}"


def untie(model: Any, backbone: torch.nn.Module) -> None:
    """Gives what stands behind a backbone its own copies of weights that are the backbone's as well, such as
    the embeddings of words: those may come to be in another precision."""
    shared = {id(parameter) for parameter in backbone.parameters()}
    inside = {id(module) for module in backbone.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
