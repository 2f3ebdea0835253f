"""The table in docs/security.md of what requests may cost: it has every field, and the bounds of the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from maxsimd.api import reading
from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers import operating, rerank, tokens
from maxsimd.api.handlers.handle import _ALL
from maxsimd.api.wire import Name
from maxsimd.engine import EngineConfig
from maxsimd.engine.media import _MAX_ASPECT_RATIO, PictureLimits
from maxsimd.engine.processors import embedding, labels
from maxsimd.engine.processors.dual_encoder import MOST_MAPPED, MOST_NOTED
from maxsimd.engine.processors.processor import MOST_EXPLAINED
from maxsimd.engine.processors.text.tokenization import MOST_DECODED
from maxsimd.engine.scoring.scorer import EXPLAINED
from maxsimd.pooling.muvera import LONGEST, MOST_PLANES, MOST_RANDOM

_PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")


def _costs() -> list[tuple[set[str], set[str], str]]:
    section = _PAGE.partition("## What a request may cost")[2].partition("\n## ")[0]
    rows = []
    for line in section.splitlines():
        if line.startswith("| `"):
            fields, routes, *_ = line.strip("|").split(" | ")
            only = set() if routes.startswith("all") else {*re.findall("`([^`]+)`", routes)}
            rows.append(({*re.findall("`([^`]+)`", fields)}, only, line))
    return rows


def _leaves(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.Metadata):
        yield from _leaves(kind.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for each in kind.types:
            yield from _leaves(each)
    else:
        yield kind


def _costly_fields(kind: msgspec.inspect.Type, at: str = "") -> Iterator[str]:
    """The fields that take a number, a list, a text or anything at all, within each other by their paths."""
    free = (
        *(msgspec.inspect.IntType, msgspec.inspect.FloatType, msgspec.inspect.StrType),
        *(msgspec.inspect.ListType, msgspec.inspect.DictType, msgspec.inspect.AnyType),
    )
    for leaf in _leaves(kind):
        if isinstance(leaf, msgspec.inspect.ListType):
            yield from _costly_fields(leaf.item_type, f"{at}[]")
        if not isinstance(leaf, msgspec.inspect.StructType):
            continue
        for field in leaf.fields:
            path = f"{at}.{field.encode_name}" if at else field.encode_name
            if any(isinstance(each, free) for each in _leaves(field.type)):
                yield path
            yield from _costly_fields(field.type, path)


def test_every_field_of_a_request_has_a_bound_in_the_table() -> None:
    sent = {
        (route.path, field)
        for route in (*_ALL, *operating.CHANGE_ROUTES)
        for kind in route.kinds
        for field in _costly_fields(msgspec.inspect.type_info(kind))
    }
    # Queries and documents may be objects.
    names = {*reading._OF_PICTURE, *reading._OF_VECTORS, *reading._OF_DIGEST, *reading.PICTURE_URL}
    sent |= {("/rerank", name) for name in names}
    costs = _costs()
    for path, field in sorted(sent):
        assert any(field in fields and (not only or path in only) for fields, only, _ in costs), (
            f"docs/security.md does not say what {field} of {path} costs, and what bounds it"
        )
    known = {field for _, field in sent} | {"explain"}
    assert {field for fields, _, _ in costs for field in fields} <= known
    assert all(len(line.strip("|").split(" | ")) == 5 for *_, line in costs)


def test_bounds_in_the_table_are_those_of_the_code() -> None:
    table = "\n".join(line for *_, line in _costs())
    server, engine = ServerConfig(), EngineConfig()
    options = re.findall(r"`--(?:limit )?([\w-]+)` \(([\d,]+)\)", table)
    assert len(options) > 10
    for option, default in options:
        name = option.replace("-", "_")
        value = getattr(server if hasattr(server, name) else engine, name)
        assert value == int(default.replace(",", "")), option
    limits = PictureLimits()
    for field, bound in (
        ("model", f"{Name.__metadata__[0].max_length:,} characters"),
        ("prompt", f"{tokens._MOST_CHARACTERS:,} characters"),
        ("tokens", f"{MOST_DECODED:,} tokens"),
        ("labels", f"{labels.MOST_LABELS:,} labels"),
        ("ids", f"{MOST_DECODED:,} tokens"),
        ("images", f"{limits.file_bytes >> 20} MiB, {limits.pixels:,} pixels"),
        ("images", f"sides as 1 to {_MAX_ASPECT_RATIO}"),
        ("rank_fields", f"{reading._MOST_WRITTEN:,} names and values a request"),
        ("rank_fields", f"{reading._DEEPEST_WRITTEN} levels"),
        ("explain", f"counts {('one', 'two', 'three', 'four')[EXPLAINED]} times"),
        ("explain", f"{MOST_EXPLAINED:,} lines, {MOST_NOTED:,} matches of windows"),
        ("explain", f"{MOST_MAPPED:,} numbers of maps"),
        ("chunks", f"at most {embedding._MOST_TIMES} times"),
        ("muvera.k_sim", f"{MOST_PLANES} hyperplanes, {MOST_RANDOM:,} random vectors, {LONGEST:,} numbers"),
        ("cascade", f"{rerank._MOST_STAGES} stages"),
    ):
        (row,) = (line for fields, _, line in _costs() if field in fields)
        assert bound in row, field
