"""The wire types of what text-embeddings-inference, Hugging Face and Infinity answer where texts are
classified, as msgspec structs. What they are asked is in `wire`."""

from typing import Literal

import msgspec

from maxsimd.api.wire import Usage, Warned


class LabelScore(msgspec.Struct):
    score: float
    label: str


class LabelsResponse(Warned):
    """Infinity's: all labels of each text, best first."""

    id: str
    created: int
    model: str
    data: list[list[LabelScore]]
    usage: Usage
    object: Literal["classify"] = "classify"
