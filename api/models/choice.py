"""Which of several models a request goes to that names none: the first that is made for what it asks. A
function of what the models are."""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import TypeAlias

from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.facts import ModelFacts

_RERANKERS = (ScoreType.CROSS_ENCODER, ScoreType.LATE_INTERACTION, ScoreType.LISTWISE)


class Wanted(Enum):
    """What a request asks for."""

    RANKING = auto()
    VECTORS = auto()
    TOKEN_VECTORS = auto()
    SPARSE_VECTORS = auto()
    CLASSES = auto()
    ANYTHING = auto()
    # All models that the request names, and no other.
    CASCADE = auto()


class UndecidedError(Exception):
    """The model `name`, which could not be loaded, may be the one that is meant."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


_Fits: TypeAlias = Callable[[ModelFacts], bool]


def _anything(facts: ModelFacts) -> bool:
    return True


def _ranks(facts: ModelFacts) -> bool:
    return facts.score_type in _RERANKERS and not facts.is_classifier


def _scores(facts: ModelFacts) -> bool:
    return not facts.is_classifier


def _classifies(facts: ModelFacts) -> bool:
    return facts.score_task == "classify"


def _gives(*tasks: str) -> _Fits:
    return lambda facts: any(task in facts.dims for task in tasks)


# The first of these that fits any model decides, and of the models that it fits the first.
_PREFERENCES: dict[Wanted, tuple[_Fits, ...]] = {
    Wanted.RANKING: (_ranks, _scores, _anything),
    Wanted.VECTORS: (_gives("embed"), _gives("token_embed", "sparse_embed"), _anything),
    Wanted.TOKEN_VECTORS: (_gives("token_embed"), _gives("embed"), _anything),
    Wanted.SPARSE_VECTORS: (_gives("sparse_embed"), _gives("embed", "token_embed"), _anything),
    Wanted.CLASSES: (lambda facts: facts.is_classifier, _classifies, _anything),
    Wanted.ANYTHING: (_anything,),
}


def first_for(wanted: Wanted, models: Mapping[str, ModelFacts | None]) -> str:
    """The name of the first of the models, of which there is one at least, that is made for this; None is of
    models that nothing is known of. Raises UndecidedError where one of these might come before it."""
    for fits in _PREFERENCES[wanted]:
        for name, facts in models.items():
            if facts is None:
                raise UndecidedError(name)
            if fits(facts):
                return name
    raise ValueError("there is no model")
