"""References: what a checkpoint's own library computes for one sequence, alone and without padding. The
engine's execution of a model is proven against them; where that fails, they run the model.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from maxsimd.engine.checkpoint.visual import Tower
from maxsimd.pooling.methods import CONCATENATED
from maxsimd.scheduler import TokenSequence


class Reference(Protocol):
    """The item of one sequence, float32 on the model's device: [1, dim] for tasks with one vector per
    sequence, [tokens, dim] for tasks with one vector per token."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor: ...


# Makes a model's inputs for the pictures of a sequence; None for one that reads only text.
MorePictures: TypeAlias = Callable[[TokenSequence], dict[str, torch.Tensor]] | None


class StatesReference:
    """Base of the references that apply a `head` to a backbone's last hidden states. `pictures` makes the
    inputs for those of a sequence."""

    def __init__(self, backbone: Any, tokenizer: Any, head: Any) -> None:
        self.pictures: MorePictures = None
        self._backbone = backbone
        self._tokenizer = tokenizer
        self._head = head

    def _states(self, sequence: TokenSequence) -> torch.Tensor:
        """The last hidden states [tokens, hidden] in float32."""
        inputs = inputs_of(sequence, self._tokenizer, self._backbone)
        if self.pictures is not None:
            inputs |= self.pictures(sequence)
        states: torch.Tensor = self._backbone(**inputs).last_hidden_state[0].float()
        return states


class ClassifierReference:
    """The logits [1, labels] of a transformers model with a head for classification."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self._tokenizer = tokenizer

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        inputs = inputs_of(sequence, self._tokenizer, self.model)
        logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()


class LastStateReference(StatesReference):
    """A head's output for a backbone's last hidden state: [1, dim]."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        made: torch.Tensor = self._head(self._states(sequence)[-1:])
        return made


class WordLogitsReference:
    """A language model's logit of the first of one or two words, minus that of the second: [1, 1]. `output`
    replaces the model's output layer: it has the rows of these words alone, in float32. `pictures` makes the
    inputs for those of a sequence."""

    def __init__(self, model: Any, tokenizer: Any, output: torch.nn.Linear) -> None:
        self.pictures: MorePictures = None
        model.set_output_embeddings(output)
        self._model = model
        self._tokenizer = tokenizer

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        inputs: dict[str, Any] = dict(inputs_of(sequence, self._tokenizer, self._model))
        if self.pictures is not None:
            inputs |= self.pictures(sequence)
        if declares(self._model, "logits_to_keep"):
            inputs["logits_to_keep"] = 1
        logits: torch.Tensor = self._model(**inputs).logits[0, -1]  # [words]
        return (logits[:1] - logits[1:].sum()).float()[None]


class FirstWordReference:
    """An encoder-decoder's logit of the first of two words, minus that of the second, as the first word of
    its answer: [1, 1]. `output` replaces the model's output layer, as in `WordLogitsReference`."""

    def __init__(self, model: Any, tokenizer: Any, output: torch.nn.Linear) -> None:
        model.set_output_embeddings(output)
        self._model = model
        self._tokenizer = tokenizer

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        inputs = inputs_of(sequence, self._tokenizer, self._model)
        start = torch.full((1, 1), self._model.config.decoder_start_token_id)
        inputs["decoder_input_ids"] = start.to(inputs["input_ids"].device)
        logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0, -1]  # [2]
        return (logits[:1] - logits[1:]).float()[None]


class ModulesReference:
    """The output of sentence-transformers' modules, run one after the other, under the name `feature`:
    sentence_embedding [1, dim] or token_embeddings [tokens, dim]. `pictures` makes the inputs for those of a
    sequence."""

    def __init__(self, modules: Sequence[torch.nn.Module], tokenizer: Any, feature: str) -> None:
        self.pictures: MorePictures = None
        self._modules = list(modules)
        self._tokenizer = tokenizer
        self._feature = feature

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        transformer: Any = self._modules[0]
        features: dict[str, Any] = dict(inputs_of(sequence, self._tokenizer, transformer.auto_model))
        if self.pictures is not None:
            features |= self.pictures(sequence)
        # The modules after the transformer need the mask, whether or not the transformer takes it.
        if "attention_mask" not in features:
            features["attention_mask"] = torch.ones_like(features["input_ids"])
        if sequence.tokens.pooled_positions is not None:
            features["prompt_length"] = int(sequence.tokens.pooled_positions[0])
        for module in self._modules:
            features = module(features)
        rows: torch.Tensor = features[self._feature].float()
        return rows[0] if self._feature == "token_embeddings" else rows


class VisualReference:
    """The token embeddings [tokens, dim] of a transformers `*ForRetrieval` model, for a text or a picture."""

    def __init__(self, model: Any, tower: Tower) -> None:
        self._model = model
        self._tower = tower
        # Tokens of type 0 attend to all.
        self._takes_type_ids = declares(model.vlm, "token_type_ids")

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        parameter = next(self._model.parameters())
        ids = torch.from_numpy(sequence.tokens.ids).long()
        images = sequence.tokens.images
        for image in images:
            ids[torch.from_numpy(image.positions)] = self._model.config.vlm_config.image_token_id
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        if images:
            inputs |= self._tower.inputs([image.inputs for image in images], torch.device("cpu"))
        if "image_grid_thw" in inputs:  # patches of one picture, as its processor hands them on
            inputs["pixel_values"] = inputs["pixel_values"][None]
        elif self._takes_type_ids:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        moved = {
            name: each.to(parameter.device, parameter.dtype if each.is_floating_point() else None)
            for name, each in inputs.items()
        }
        rows: torch.Tensor = self._model(**moved).embeddings[0].float()
        return rows


class HiddenStatesReference(StatesReference):
    """A backbone's last hidden states through a head that maps each by itself: [tokens, dim]."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        rows: torch.Tensor = self._head(self._states(sequence))
        return rows


class PooledReference(StatesReference):
    """Pools a backbone's hidden states and applies a head: [1, dim]. `pooling` names methods, whose vectors
    are concatenated."""

    def __init__(self, backbone: Any, tokenizer: Any, pooling: str, head: Any) -> None:
        super().__init__(backbone, tokenizer, head)
        self._pooling = pooling

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        rows = self._states(sequence)
        positions = torch.arange(sequence.tokens.num_attended, device=rows.device)
        if sequence.tokens.pooled_positions is not None:
            pooled = torch.from_numpy(sequence.tokens.pooled_positions).to(rows.device)
            positions = pooled[pooled < sequence.tokens.num_attended]
        vectors = [_pooled(rows, positions, method) for method in self._pooling.split(CONCATENATED)]
        made: torch.Tensor = self._head(torch.cat(vectors)[None])
        return made


def _pooled(rows: torch.Tensor, positions: torch.Tensor, method: str) -> torch.Tensor:
    """The vector [dim] that pools the rows at `positions` of rows [tokens, dim].

    `weighted-mean` gives position i the weight i + 1 (Muennighoff 2022, arXiv 2202.08904)."""
    match method:
        case "cls":
            return rows[0]
        case "cls-after-prompt":
            return rows[positions[0]]
        case "last":
            return rows[positions[-1]]
        case "mean":
            return rows[positions].mean(dim=0)
        case "mean-sqrt-len":
            return rows[positions].sum(dim=0) / math.sqrt(len(positions))
        case "max-pooling":
            return rows[positions].amax(dim=0)
        case "weighted-mean":
            weights = (positions + 1).float()
            return (rows[positions] * weights[:, None]).sum(dim=0) / weights.sum()
    raise ValueError(f"unknown pooling {method!r}")


def inputs_of(sequence: TokenSequence, tokenizer: Any, model: Any) -> dict[str, torch.Tensor]:
    """The inputs that the library would make of a sequence: int64 [1, tokens] each, those that both the
    tokenizer makes and the model takes."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(sequence.tokens.ids).long()[None]
    inputs = {"input_ids": ids}
    if takes(model, "attention_mask"):
        attended = torch.arange(len(sequence)) < sequence.tokens.num_attended
        inputs["attention_mask"] = attended.long()[None]
    if sequence.tokens.type_ids is not None and takes_type_ids(model, tokenizer):
        inputs["token_type_ids"] = torch.from_numpy(sequence.tokens.type_ids).long()[None]
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward takes an input of this name, or any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def declares(model: Any, name: str) -> bool:
    """Whether a model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters


def takes_type_ids(model: Any, tokenizer: Any) -> bool:
    """Whether the model distinguishes the texts of a pair by token types: it takes them, and its tokenizer
    makes them, or it needs those that a template gives."""
    made = "token_type_ids" in getattr(tokenizer, "model_input_names", ())
    return (made or getattr(model, "needs_type_ids", False)) and declares(model, "token_type_ids")
