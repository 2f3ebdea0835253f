"""The properties of a backbone that packed execution depends on, found out from the model itself."""

from typing import Any

import torch

from maxsimd.engine.checkpoint.reference import declares

# Tokenisers without a limit have a number of at least this size in its place.
_NO_LIMIT = 1_000_000


def position_offset(backbone: torch.nn.Module) -> int:
    """The position of the first token: RoBERTa's descendants count from `padding_idx + 1`, others from 0."""
    embeddings = _embeddings_beside_padding(backbone)
    return 0 if embeddings is None else int(embeddings.padding_idx) + 1


@torch.inference_mode()
def uncounted_id(backbone: torch.nn.Module) -> int | None:
    """The token that has the position before the first wherever it stands, and is not counted: the padding
    token of RoBERTa and its descendants, also where a text has it. None for models that count every token."""
    embeddings = _embeddings_beside_padding(backbone)
    if embeddings is None:
        return None
    padding, seen = int(embeddings.padding_idx), []
    others = [token for token in range(3) if token != padding]
    ids = torch.tensor([[others[0], padding, others[1]]], device=next(backbone.parameters()).device)
    hook = embeddings.position_embeddings.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        embeddings(input_ids=ids)
    except Exception:  # it takes more than ids; all such models of transformers number positions by id
        return padding
    finally:
        hook.remove()
    by_id = torch.tensor([[padding + 1, padding, padding + 2]])
    return padding if seen and torch.equal(seen[0].cpu(), by_id) else None


def _embeddings_beside_padding(backbone: torch.nn.Module) -> Any:
    """The module that makes embeddings of token ids and positions and knows the padding token, if any."""
    for module in backbone.modules():
        positions = getattr(module, "position_embeddings", None)
        if isinstance(getattr(module, "padding_idx", None), int) and isinstance(
            positions, torch.nn.Embedding
        ):
            return module
    return None


def max_tokens(config: Any, tokenizer: Any, offset: int) -> int:
    """The longest sequence, special tokens included, that both the model and its tokeniser take."""
    positions = getattr(config, "max_position_embeddings", None)
    # Some configs have -1, or nothing, where positions are relative and unlimited.
    limits = [positions - offset] if isinstance(positions, int) else []
    limits.append(getattr(tokenizer, "model_max_length", None) or 0)
    if getattr(config, "attention_type", None) == "block_sparse":
        # BigBird attends sparsely to texts longer than this. The first text that is not longer switches it to
        # full attention for good, so that results for longer ones depend on the texts before
        # (`BigBirdModel.forward`).
        limits.append((5 + 2 * config.num_random_blocks) * config.block_size)
    return min((int(limit) for limit in limits if 0 < limit < _NO_LIMIT), default=512)


def token_rows(backbone: Any) -> int | None:
    """How many token ids have embeddings; None for a backbone that does not say."""
    try:
        return int(backbone.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


@torch.inference_mode()
def is_causal(backbone: Any) -> bool:
    """Whether a token's hidden state depends only on the tokens before it.

    Tried by changing the last of a few tokens and comparing the first. False for a model on which this fails,
    which cannot be packed either."""
    try:
        size = backbone.get_input_embeddings().weight.shape[0]
        device = next(backbone.parameters()).device
        ids = torch.arange(8, device=device)[None] % size
        changed = ids.clone()
        changed[0, -1] = size - 1
        options = {"use_cache": False} if declares(backbone, "use_cache") else {}
        first, second = (
            backbone(input_ids=batch, **options).last_hidden_state[0, 0] for batch in (ids, changed)
        )
    except Exception:
        return False
    return bool(torch.equal(first, second))
