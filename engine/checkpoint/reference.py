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


class ModelReference:
    """Base of the references that run a transformers `model`. `pictures` makes the inputs for those of a
    sequence."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.pictures: MorePictures = None
        self.model = model
        self._tokenizer = tokenizer

    def _inputs(self, sequence: TokenSequence) -> dict[str, Any]:
        inputs: dict[str, Any] = dict(inputs_of(sequence, self._tokenizer, self.model))
        if declares(self.model, "use_cache"):
            inputs["use_cache"] = False  # caches have a place for each layer, also for those left out
        return inputs if self.pictures is None else inputs | self.pictures(sequence)


class StatesReference(ModelReference):
    """Pools a backbone's last hidden states and applies a head: [1, dim]. `pooling` names methods, whose
    vectors are concatenated. With "all" the head maps each state by itself: [tokens, dim]."""

    def __init__(self, backbone: Any, tokenizer: Any, head: Any, pooling: str = "all") -> None:
        super().__init__(backbone, tokenizer)
        self._head = head
        self._pooling = pooling

    def _states(self, sequence: TokenSequence) -> torch.Tensor:
        """The last hidden states [tokens, hidden] in float32; fewer rows if the model compresses them."""
        states: torch.Tensor = self.model(**self._inputs(sequence)).last_hidden_state[0].float()
        return states

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        rows = self._states(sequence)
        if self._pooling != "all":
            positions = torch.arange(len(rows), device=rows.device)[: sequence.tokens.num_attended]
            if sequence.tokens.pooled_positions is not None:
                pooled = torch.from_numpy(sequence.tokens.pooled_positions).to(rows.device)
                positions = pooled[pooled < sequence.tokens.num_attended]
            vectors = [_pooled(rows, positions, method) for method in self._pooling.split(CONCATENATED)]
            rows = torch.cat(vectors)[None]
        made: torch.Tensor = self._head(rows)
        return made


class ClassifierReference(ModelReference):
    """The logits [1, labels] of a transformers model with a head for classification."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        logits: torch.Tensor = self.model(**self._inputs(sequence)).logits
        return logits.float()


class TokenClassifierReference(ClassifierReference):
    """The logits [tokens, labels] of a transformers model that labels tokens."""

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        return super().__call__(sequence)[0]


class WordLogitsReference(ModelReference):
    """The logit of the first of one or two words, minus that of the second: [1, 1]. A language model says it
    next, an encoder-decoder first in its answer. `output` replaces the model's output layer: it has the rows
    of these words alone, in float32."""

    def __init__(self, model: Any, tokenizer: Any, output: torch.nn.Linear) -> None:
        super().__init__(model, tokenizer)
        model.set_output_embeddings(output)

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        inputs = self._inputs(sequence)
        if getattr(self.model.config, "is_encoder_decoder", False):
            start = torch.full((1, 1), self.model.config.decoder_start_token_id)
            inputs["decoder_input_ids"] = start.to(inputs["input_ids"].device)
        elif declares(self.model, "logits_to_keep"):
            inputs["logits_to_keep"] = 1
        logits: torch.Tensor = self.model(**inputs).logits[0, -1]  # [words]
        return (logits[:1] - logits[1:].sum()).float()[None]


class ModulesReference(ModelReference):
    """The output of sentence-transformers' modules, run one after the other, under the name `feature`:
    sentence_embedding [1, dim] or token_embeddings [tokens, dim]."""

    def __init__(self, modules: Sequence[Any], tokenizer: Any, feature: str) -> None:
        super().__init__(modules[0].auto_model, tokenizer)
        self._modules = list(modules)
        self._feature = feature

    def __call__(self, sequence: TokenSequence) -> torch.Tensor:
        features = self._inputs(sequence)
        features.pop("use_cache", None)  # the library's modules say so themselves
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
