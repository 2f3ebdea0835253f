"""What a later stage of a cascade refuses for certain is told before any stage runs."""

from typing import Any

import numpy as np
import pytest

from maxsimd.engine import Engines, InvalidRequestError, PictureFile, Stage
from maxsimd.engine.requests import Truncation

# Engines belong to one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["a cat", "a dog", "rain"]
LONG = "word " * 300
VECTOR = np.ones((3, 128), dtype=np.float32)
PAGE = PictureFile(b"no picture, which nobody opens")
TO_EMBED, TO_RERANK = ("rerank", "embed"), ("embed", "rerank")


def _stages(names: tuple[str, str], keep: int | None = None, instruction: str | None = None) -> list[Stage]:
    return [Stage(names[0], keep=keep), Stage(names[1], instruction=instruction)]


@pytest.mark.parametrize(
    ("query", "documents", "stages", "options", "message"),
    [
        ("a", TEXTS, _stages(TO_RERANK, 1, "be kind"), {}, "this model takes no instruction"),
        ("a", [VECTOR] * 2, _stages(TO_RERANK, 1, "be kind"), {}, "this model takes no instruction"),
        (LONG, TEXTS, _stages(TO_EMBED, 1), {"truncation": "error"}, "queries[0] has 310 tokens"),
        (LONG * 2, TEXTS, _stages(TO_RERANK, 1), {"truncation": "error"}, "documents[0] has 605 tokens"),
        ("a", [*TEXTS, LONG], _stages(TO_EMBED, 4), {"truncation": "error"}, "documents[3] has 302 tokens"),
        ("a", [*TEXTS, LONG], _stages(TO_EMBED), {"truncation": "error"}, "documents[3] has 302 tokens"),
        ("a", ["a", LONG, LONG], _stages(TO_EMBED, 2), {"truncation": "error"}, "documents[1] has 302"),
        (
            "a",
            TEXTS,
            _stages(TO_EMBED, 1),
            {"truncation": Truncation(max_tokens=400)},
            "truncate_prompt_tokens is 400, more than the 256 tokens",
        ),
        (VECTOR, TEXTS, _stages(TO_RERANK, 1), {}, "queries[0] is an embedding, but this model"),
        ("a", ["a", VECTOR, VECTOR], _stages(TO_RERANK, 2), {}, "documents[1] is an embedding, but this"),
        (PAGE, TEXTS, _stages(TO_RERANK, 1), {}, "queries[0] is a picture; this model reads only text"),
        ("a", [*TEXTS, PAGE], _stages(TO_RERANK, 4), {}, "documents[3] is a picture; this model reads only"),
    ],
)
async def test_certain_refusals_are_told_before_any_stage_runs(
    both: Engines,
    monkeypatch: pytest.MonkeyPatch,
    query: Any,
    documents: list[Any],
    stages: list[Stage],
    options: dict[str, Any],
    message: str,
) -> None:
    async def rerank(*texts: Any, **options: Any) -> None:
        pytest.fail("a stage ran")

    for name in both.names:
        monkeypatch.setattr(both[name], "rerank", rerank)
    with pytest.raises(InvalidRequestError) as refused:
        await both.rerank(query, documents, stages, **options)
    assert str(refused.value).startswith(message)
    assert str(refused.value).endswith(f"(the model {stages[1].model!r} of the cascade)")
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError):
        await both[stages[1].model].rerank(query, documents, instruction=stages[1].instruction, **options)


@pytest.mark.parametrize(
    ("documents", "options"),
    [
        ([VECTOR * 0, *TEXTS], {}),
        ([LONG * 2, LONG * 3, LONG * 2], {}),
        ([LONG * 2, "", " "], {"truncation": "window"}),
    ],
)
async def test_possible_refusals_are_not_told_before(
    both: Engines, documents: list[Any], options: dict[str, Any]
) -> None:
    """One may be of another kind, and does not come to the last stage; others are cut, or read in windows."""
    keep = len(documents) - 1
    first = (await both["embed"].rerank("a cat", documents, top_n=keep, **options)).results
    found = await both.rerank("a cat", documents, _stages(TO_RERANK, keep), **options)
    assert {one.index for one in found.results} == {one.index for one in first}


async def test_a_long_text_does_no_harm_where_it_does_not_come(both: Engines) -> None:
    for word in ("word", "cat", "rain", "dog"):
        documents = [*TEXTS, f"{word} " * 300]
        ranked = [one.index for one in (await both["rerank"].rerank("a", documents)).results]
        keep = ranked.index(3)
        if keep > 0:
            found = await both.rerank("a", documents, _stages(TO_EMBED, keep), truncation="error")
            assert {one.index for one in found.results} == set(ranked[:keep])
            return
    pytest.fail("each long text comes first, which is for the test to change")
