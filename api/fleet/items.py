"""Queries, documents and texts as they are sent to another process, and back."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from maxsimd.api.fleet.messages import (
    SentBroken,
    SentContent,
    SentInput,
    SentItem,
    SentPart,
    SentQuery,
    SentVectors,
)
from maxsimd.engine.media import Content, EncodedPicture, MissingPicture, PictureFile
from maxsimd.engine.processors.text.tokenization import is_broken
from maxsimd.engine.requests import Item
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Vectors


def sent_items(items: Sequence[Item]) -> list[SentItem]:
    """Queries or documents as they are sent."""
    if all(isinstance(item, str) and not is_broken(item) for item in items):
        return cast("list[SentItem]", list(items))
    return [sent_item(item) for item in items]


def sent_item(item: Item) -> SentItem:
    """One of them."""
    match item:
        case str():
            return SentBroken(item.encode("utf-8", "surrogatepass")) if is_broken(item) else item
        case Content():
            return _sent_content(item)
        case QueryRows():
            return sent_query(item)
    return _sent_vectors(item)


def sent_query(query: QueryRows) -> SentQuery:
    """A query that was encoded, as it is sent."""
    return SentQuery(_sent_vectors(query), query.tokens, query.truncated, query.fingerprint)


def sent_inputs(inputs: Sequence[str | tuple[int, ...] | Content]) -> list[SentInput]:
    """Texts, token ids or contents as they are sent."""
    sent: list[SentInput] = []
    for each in inputs:
        match each:
            case str():
                sent.append(each)
            case Content():
                sent.append(_sent_content(each))
            case _:
                sent.append(list(each))
    return sent


def received_items(items: Sequence[SentItem]) -> list[Item]:
    """What was sent."""
    return [received_item(item) for item in items]


def received_item(item: SentItem) -> Item:
    """One of them."""
    match item:
        case str():
            return item
        case SentBroken():
            return item.text.decode("utf-8", "surrogatepass")
        case SentContent():
            return _received_content(item)
        case SentQuery():
            return received_query(item)
    return _received_vectors(item)


def received_query(query: SentQuery) -> QueryRows:
    """A query that was encoded."""
    rows = torch.as_tensor(_received_vectors(query.rows).values)
    return QueryRows(rows, tokens=query.tokens, truncated=query.truncated, fingerprint=query.fingerprint)


def received_inputs(inputs: Sequence[SentInput]) -> list[str | list[int] | Content]:
    """What was sent."""
    return [_received_content(each) if isinstance(each, SentContent) else each for each in inputs]


def _sent_vectors(item: Vectors) -> SentVectors:
    values, scales = item.values, item.scales
    is_bfloat16 = isinstance(values, torch.Tensor) and values.dtype == torch.bfloat16
    if isinstance(values, torch.Tensor):
        values = (values.view(torch.int16) if is_bfloat16 else values).detach().cpu().numpy()
    if isinstance(scales, torch.Tensor):
        scales = scales.detach().cpu().numpy()
    return SentVectors(np.asarray(values), None if scales is None else np.asarray(scales), is_bfloat16)


def _received_vectors(item: SentVectors) -> Vectors:
    if item.is_bfloat16:
        return Vectors(torch.from_numpy(item.values).view(torch.bfloat16), item.scales)
    return Vectors(item.values, item.scales)


def _sent_content(content: Content) -> SentContent:
    parts = []
    for part in content.parts:
        match part:
            case str():
                parts.append(SentPart(text=part))
            case PictureFile():
                parts.append(SentPart(file=part.data))
            case EncodedPicture():
                parts.append(SentPart(base64=part.text))
            case MissingPicture():
                parts.append(SentPart(missing=part.reason))
            case _:
                raise TypeError(f"{type(part).__name__} cannot be sent to another process")
    return SentContent(parts)


def _received_content(content: SentContent) -> Content:
    parts: list[str | PictureFile | EncodedPicture | MissingPicture] = []
    for part in content.parts:
        if part.text is not None:
            parts.append(part.text)
        elif part.file is not None:
            parts.append(PictureFile(part.file))
        elif part.base64 is not None:
            parts.append(EncodedPicture(part.base64))
        else:
            parts.append(MissingPicture(part.missing or ""))
    return Content.of(parts)
