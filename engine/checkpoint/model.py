"""The one description of a loaded model that all later stages read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.config import ScoreType
from maxsimd.pooling.methods import Head

Similarity = Literal["maxsim", "meanmaxsim", "cosine", "dot"]


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """ColBERT's query expansion: queries are filled up to `length` tokens with `token_id`.

    With `fixed` a longer query is cut to that length. Without `attended` no token attends to the filling."""

    length: int
    token_id: int
    attended: bool
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class RoleRules:
    """How a text in one role becomes token ids: a prompt in front, a length of its own, expansion, and
    tokens that take no part in scoring."""

    prompt: str = ""
    max_tokens: int | None = None
    expansion: Expansion | None = None
    skipped_ids: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Something the model can be asked for: a pooling method and what is done with the pooled rows."""

    pooling: str
    head: Head
    dim: int
    normalised: bool


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A checkpoint in memory.

    `backbone` maps token ids to hidden states; `tasks` are keyed embed, token_embed and classify, and
    `score_task` is the one that scoring is made of; `similarity` compares its items, except for a
    cross-encoder, whose logits are the scores. `max_tokens` is the longest sequence the model takes.
    """

    name: str
    score_type: ScoreType
    backbone: torch.nn.Module
    tokenizer: Any
    tasks: Mapping[str, Task]
    score_task: str
    query: RoleRules
    document: RoleRules
    max_tokens: int
    causal: bool
    position_offset: int
    takes_type_ids: bool
    activation: Head
    labels: tuple[str, ...] = ()
    similarity: Similarity = "maxsim"

    def rules(self, input_type: str | None) -> RoleRules:
        if input_type == "query":
            return self.query
        return self.document if input_type == "document" else RoleRules()
