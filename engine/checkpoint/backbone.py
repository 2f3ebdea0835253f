"""What must be known of a backbone before it can be run packed, found out from the model itself."""

import inspect
from typing import Any

import torch

# Tokenisers that know no limit say so with a number of this size.
_NO_LIMIT = 1_000_000


def takes_type_ids(backbone: Any, tokenizer: Any) -> bool:
    """Whether the model is meant to be told which text a token is of: it can be, and its tokeniser says."""
    told = "token_type_ids" in getattr(tokenizer, "model_input_names", ())
    return told and "token_type_ids" in inspect.signature(backbone.forward).parameters


def position_offset(backbone: torch.nn.Module) -> int:
    """The position of the first token: RoBERTa's descendants count from `padding_idx + 1`, others from 0."""
    for module in backbone.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(
            getattr(module, "position_embeddings", None), torch.nn.Embedding
        ):
            return padding + 1
    return 0


def max_tokens(config: Any, tokenizer: Any, offset: int) -> int:
    """The longest sequence, special tokens included, that both the model and its tokeniser take."""
    limits = [getattr(tokenizer, "model_max_length", None), getattr(config, "max_position_embeddings", None)]
    if limits[1] is not None:
        limits[1] -= offset
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < _NO_LIMIT]
    return min(known, default=512)


@torch.inference_mode()
def is_causal(backbone: Any) -> bool:
    """Whether a token's hidden state depends only on the tokens before it.

    Asked of the model by changing the last of a few tokens and looking at the first."""
    size = backbone.get_input_embeddings().weight.shape[0]
    device = next(backbone.parameters()).device
    ids = torch.arange(8, device=device)[None] % size
    changed = ids.clone()
    changed[0, -1] = size - 1
    mask = torch.ones_like(ids)
    first, second = (
        backbone(input_ids=batch, attention_mask=mask).last_hidden_state[0, 0] for batch in (ids, changed)
    )
    return bool(torch.equal(first, second))
