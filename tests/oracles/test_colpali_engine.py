"""Pages and queries are encoded as colpali-engine encodes them, whose authors trained the models.

It needs torch with CUDA's libraries and torchvision, so it has an environment of its own, made the first time
(gigabytes), and runs where MAXSIMD_ORACLES is set: `make test-oracles`."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from maxsimd.engine import EngineConfig
from tests.checkpoints import vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.clients.environments import made
from tests.engines import Engines
from tests.parity.pictures import PAGES, QUERIES, noise

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("MAXSIMD_ORACLES" not in os.environ, reason="run by make test-oracles"),
]

_SIDE = Path(__file__).with_name("colpali_engine_side.py")


@dataclass(frozen=True)
class Family:
    """A checkpoint and the class of colpali-engine for it. Where transformers writes queries and pages in
    words of its own, those are `prefix`, `suffix` and `page`. `size` is that of a page that needs no
    resizing."""

    build: Callable[[Path], str]
    name: str
    size: tuple[int, int] | None = None
    prefix: str = ""
    suffix: str | None = None
    page: str | None = None


FAMILIES = [
    # colpali-engine itself has the beginning of a text twice behind a page.
    Family(visual.colpali, "ColPali", (56, 56), "Query: ", "<pad>" * 10 + "\n", "<image>Describe the image."),
    Family(vision_language.colqwen2_merged, "ColQwen2", (84, 112)),
    Family(vision_language.colqwen2_5, "ColQwen2_5", (84, 112)),
    Family(vision_language.colqwen3, "ColQwen3", (96, 128)),
    Family(vision_language.colsmol, "ColIdefics3"),
    Family(visual.colmodernvbert, "ColModernVBert"),
]


def colpali_engine(
    family: Family, checkpoint: str, pages: list[Image.Image], folder: Path, backend: str
) -> dict[str, NDArray[np.float32]]:
    """What colpali-engine makes of the queries (q0, q1, ...) and of pages (p0, p1, ...)."""
    paths = [folder / f"{i}.png" for i in range(len(pages))]
    for page, path in zip(pages, paths, strict=True):
        page.save(path)
    order = {
        "family": family.name,
        "checkpoint": checkpoint,
        "queries": [family.prefix + query for query in QUERIES],
        "suffix": family.suffix,
        "page": family.page,
        "pages": [*map(str, paths)],
        "backend": backend,
        "output": str(folder / "found.npz"),
    }
    command = [made("colpali"), str(_SIDE)]
    subprocess.run(command, input=json.dumps(order), text=True, check=True, timeout=600)
    with np.load(folder / "found.npz") as found:
        return dict(found)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.build.__name__)
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
async def test_embeddings_equal_colpali_engine(
    family: Family, backend: str, checkpoints: SharedCheckpoints, engines: Engines, tmp_path: Path
) -> None:
    pages = PAGES
    if backend == "torchvision":
        if family.size is None:
            pytest.skip("a tile of the whole page is always resized, and torchvision rounds otherwise")
        pages = [noise(*family.size, 9)]
    checkpoint = checkpoints(family.build)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    expected = colpali_engine(family, checkpoint, pages, tmp_path, backend)
    queries = await engine.embed_tokens(QUERIES, input_type="query")
    for i, rows in enumerate(queries.embeddings):
        np.testing.assert_allclose(rows, expected[f"q{i}"], atol=1e-4)
    of_pages = await engine.embed_tokens(pages, input_type="document")
    for i, rows in enumerate(of_pages.embeddings):
        np.testing.assert_allclose(rows, expected[f"p{i}"], atol=1e-4)
    result = await engine.score(QUERIES[0], pages, cache="bypass")
    scores = [(expected["q0"] @ expected[f"p{i}"].T).max(axis=1).sum() for i in range(len(pages))]
    np.testing.assert_allclose(result.scores, scores, atol=1e-4)
