"""Texts that come in one of several forms, which are told apart in `reading`, with messages of its own. What
they may be stands here for /openapi.json alone."""

from typing import Annotated, Any

import msgspec

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}


def _some(*schemas: Schema) -> Schema:
    """A list of one of these, not empty."""
    return {"anyOf": [{"type": "array", "items": each, "minItems": 1} for each in schemas]}


_ONE_OR_TWO: Schema = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}

# A text, texts, token ids or lists of those; or objects that hold a text, as Jina's clients send.
Texts = Annotated[
    Any, msgspec.Meta(extra_json_schema={"anyOf": [_TEXT, _IDS, _some(_TEXT, {"type": "object"}, _IDS)]})
]
# A text, a pair of texts, or a list of lists of either.
Sequences = Annotated[
    Any, msgspec.Meta(extra_json_schema={"anyOf": [_TEXT, _ONE_OR_TWO, _some(_ONE_OR_TWO)]})
]
