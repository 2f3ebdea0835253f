"""Checks of what callers pass in; each error names the argument and says what to change."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.media import (
    AnyPicture,
    Content,
    OpenImage,
    Picture,
    PictureFile,
    PillowPicture,
    is_pillow,
)
from maxsimd.engine.requests import (
    CUT_LONG,
    REFUSE_LONG,
    WINDOW_LONG,
    Item,
    LongInputPolicy,
    ScoreOptions,
    Truncation,
)
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Embedding, Vectors

# A text, its embedding, or a picture: content with one, a file's bytes, or one that was opened with Pillow.
Scorable: TypeAlias = str | Embedding | Content | Picture | PictureFile | OpenImage
Scored: TypeAlias = Scorable | Sequence[Scorable]

_POLICIES = {"cut": CUT_LONG, "error": REFUSE_LONG, "window": WINDOW_LONG}


def as_config(config: EngineConfig | str | None, options: Mapping[str, Any]) -> EngineConfig:
    """A configuration, from one or from a model's name and options. Raises TypeError for anything else, and
    ValueError for options that make no sense."""
    if isinstance(config, str):
        return EngineConfig(model=config, **options)
    if config is None:
        return EngineConfig(**options)
    if not isinstance(config, EngineConfig):
        raise TypeError(f"give an EngineConfig, or a model's folder or hub id, not {type(config).__name__}")
    if options:
        raise TypeError(f"put {' and '.join(options)} into the EngineConfig")
    return config


def as_texts(texts: str | Sequence[str], param: str) -> tuple[str, ...]:
    """One text or many as a tuple. Raises InvalidRequestError for none, or for anything but strings."""
    texts = (texts,) if isinstance(texts, str) else tuple(_in_order(texts, param))
    if not texts:
        raise InvalidRequestError(f"{param} is empty; give at least one text", param)
    if set(map(type, texts)) != {str}:  # else each of thousands of texts would be looked at in Python
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequestError(f"{param}[{i}] is not a string but {type(text).__name__}", param)
    return texts


def as_scored(items: Any, param: str, takes_vectors: bool, takes_pictures: bool) -> tuple[Item, ...]:
    """Texts, embeddings or pictures, one or many, as a tuple: an array of one or two dimensions is one
    embedding. Raises InvalidRequestError for none, for anything else, for embeddings unless the model
    `takes_vectors`, and for pictures unless it `takes_pictures`."""
    if isinstance(items, str | Vectors) or (_is_array(items) and items.ndim < 3) or _is_content(items):
        given: tuple[Any, ...] = (items,)
    else:
        given = tuple(items if _is_array(items) else _in_order(items, param))
    if not set(map(type, given)) - {str}:
        return as_texts(given, param)
    scored = tuple(
        Vectors(item) if _is_array(item) else as_content(item, f"{param}[{i}]", param, takes_pictures)
        for i, item in enumerate(given)
    )
    for i, item in enumerate(scored):
        if not isinstance(item, str | Vectors | Content):
            kind = type(item).__name__
            raise InvalidRequestError(
                f"{param}[{i}] is neither a string nor an array nor a picture but {kind}", param
            )
        if isinstance(item, QueryRows) and param == "documents":
            raise InvalidRequestError(f"{param}[{i}] is a query's embedding; give it as the query", param)
        if isinstance(item, Vectors) and not takes_vectors:
            raise InvalidRequestError(
                f"{param}[{i}] is an embedding, but this model reads query and document together; give texts",
                param,
            )
    return scored


def as_query(query: Any, takes_pictures: bool) -> tuple[Item, ...]:
    """One text or picture to encode, as a tuple. Raises InvalidRequestError for anything else."""
    queries = as_scored(query, "queries", takes_vectors=True, takes_pictures=takes_pictures)
    if len(queries) != 1:
        raise InvalidRequestError(f"give one query to encode, not {len(queries)}", "queries")
    if isinstance(queries[0], Vectors):
        raise InvalidRequestError("the query is an embedding already; give a text", "queries")
    return queries


def as_content(item: Any, where: str, param: str, takes_pictures: bool) -> Any:
    """A picture as content, content without pictures as its text, and anything else as it is. Raises
    InvalidRequestError for pictures unless the model `takes_pictures`."""
    if not _is_content(item):
        return item
    content = item if isinstance(item, Content) else Content.of([_as_picture(item)])
    if not content.pictures:
        return "\n".join(content.texts)
    if not takes_pictures:
        raise InvalidRequestError(f"{where} is a picture; this model reads only text", param)
    return content


def _is_content(item: Any) -> bool:
    return isinstance(item, Content | Picture | PictureFile) or is_pillow(item)


def _as_picture(item: Any) -> AnyPicture:
    return PillowPicture(item) if is_pillow(item) else cast("AnyPicture", item)


def _is_array(item: Any) -> bool:
    """Whether something is an array of numbers: an embedding, if its shape fits."""
    return isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype.kind not in "OSU")


def as_inputs(inputs: Any, takes_pictures: bool) -> tuple[str | tuple[int, ...] | Content, ...]:
    """Texts, lists of token ids or pictures, as a tuple. Raises InvalidRequestError for pictures unless the
    model `takes_pictures`."""
    given = [inputs] if isinstance(inputs, str) or _is_content(inputs) else _in_order(inputs, "input")
    contents = [as_content(item, f"input[{i}]", "input", takes_pictures) for i, item in enumerate(given)]
    each = tuple(item if isinstance(item, str | Content) else tuple(item) for item in contents)
    if not each:
        raise InvalidRequestError("input is empty; give at least one text", "input")
    return each


def _in_order(items: Any, param: str) -> Any:
    """A list or something like one. Raises InvalidRequestError for what has no order, or would give something
    else than its items: a table gives the names of its columns."""
    is_column = getattr(items, "ndim", None) == 1  # of numpy, pandas or torch
    if is_column or (isinstance(items, Sequence | Iterator) and not isinstance(items, bytes)):
        return items
    raise InvalidRequestError(
        f"{param} must be a string or a list of strings, not {type(items).__name__}; give a list, such as "
        "one column of a table",
        param,
    )


def as_truncation(policy: LongInputPolicy) -> Truncation:
    """What to do with inputs that are too long. Raises InvalidRequestError for a word that is not known."""
    found = policy if isinstance(policy, Truncation) else _POLICIES.get(policy)
    if found is None:
        raise InvalidRequestError(
            f"truncation {policy!r} is not known; use cut, error, window or a Truncation", "truncation"
        )
    return found


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that `Engine.score` does not have, where a method passes its on."""
    if unknown := options.keys() - ScoreOptions.__annotations__.keys():
        raise TypeError(f"{method}() has no argument {' or '.join(sorted(unknown))}")


def check_paired(queries: Sequence[object], documents: Sequence[object]) -> None:
    """Refuses queries and documents in a shape that cannot be scored: it is 1:1, 1:N or N:N."""
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            "Input lengths must be either 1:1, 1:N or N:N; "
            f"there are {len(queries)} queries and {len(documents)} documents",
            "documents",
        )


def check_dimensions(dimensions: int | None, dim: int) -> None:
    """Refuses more embedding columns than the model has, and fewer than one."""
    if dimensions is not None and not 1 <= dimensions <= dim:
        raise InvalidRequestError(f"dimensions must be from 1 to {dim}, not {dimensions}", "dimensions")


def check_task(task: str, tasks: Collection[str]) -> None:
    """Raises InvalidRequestError for a task that a model cannot do."""
    if task not in tasks:
        raise InvalidRequestError(f"this model cannot {task}; it can {' and '.join(sorted(tasks))}", "task")
