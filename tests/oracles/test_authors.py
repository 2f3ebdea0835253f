"""Scores and embeddings are those of the libraries whose authors trained the models: FlagEmbedding for bge-m3
and bge-reranker-v2.5-gemma2-lightweight, and colpali-engine for pages and queries.

They have environments of their own, made the first time (colpali-engine's takes gigabytes), and run where
MAXSIMD_ORACLES is set: `make test-oracles`. Other interpreters that have FlagEmbedding can be named by
MAXSIMD_FLAG_EMBEDDING and, with transformers 4.46, MAXSIMD_FLAG_EMBEDDING_GEMMA2."""

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

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.checkpoints import retrained, vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.checkpoints.weights import change_config
from tests.clients.environments import made
from tests.engines import Engines
from tests.parity.pictures import PAGES, QUERIES, noise

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("MAXSIMD_ORACLES" not in os.environ, reason="run by make test-oracles"),
]


def _asked(python: str, side: str, folder: Path, **order: Any) -> dict[str, NDArray[np.float64]]:
    order["output"] = str(folder / "found.npz")
    command = [python, str(Path(__file__).with_name(side))]
    subprocess.run(command, input=json.dumps(order), text=True, check=True, timeout=600)
    with np.load(folder / "found.npz") as found:
        return dict(found)


def _by_flag_embedding(
    environment: str, checkpoint: str, pairs: list[Pair], folder: Path, **more: Any
) -> dict[str, NDArray[np.float64]]:
    name = f"MAXSIMD_{environment.replace('flagembedding', 'flag_embedding').replace('-', '_').upper()}"
    python, texts = os.environ.get(name) or made(environment), [(pair.query, pair.document) for pair in pairs]
    return _asked(python, "flag_embedding_side.py", folder, checkpoint=checkpoint, pairs=texts, **more)


def _compare(name: str, found: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    assert expected.std() > 0.005, "the checkpoint must tell pairs apart"
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=name)
    print(f"{name}: largest difference {np.abs(found - expected).max():.1e}")


KINDS = {
    "bi-encoder": "dense", "sparse": "sparse", "late-interaction": "colbert",
    "hybrid": "colbert+sparse+dense",
}  # fmt: skip


async def test_equals_flagembedding(bge_m3: str, engines: Engines, pairs: list[Pair], tmp_path: Path) -> None:
    expected = _by_flag_embedding("flagembedding", bge_m3, pairs[:100], tmp_path, weights=(0.4, 0.2, 0.4))
    for kind, name in KINDS.items():
        config = EngineConfig(model=bge_m3, dtype="float32", score_type=kind, allow_pickle=True)  # type: ignore[arg-type]
        _compare(kind, await engines.scores(config, pairs[:100]), expected[name])


# Cutoff, ratio and layers of token compression: none, [k], [k, m], and a layer that is not reached.
RUNS = [(4, 1, (8,)), *((4, ratio, layers) for ratio in (2, 4) for layers in ((2,), (1, 3))), (3, 2, (2, 3))]


async def test_token_compression_equals_flag_embedding(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    path = checkpoints(retrained.bge_gemma2)
    copy = checkpoints.copy(retrained.bge_gemma2, tmp_path / "copy")
    # Earlier transformers do not know the class of its tokenizer.
    change_config(copy, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    runs = {
        str(i): {"cutoff_layers": [cutoff], "compress_ratio": ratio, "compress_layers": layers}
        for i, (cutoff, ratio, layers) in enumerate(RUNS)
    }
    expected = _by_flag_embedding("flagembedding-gemma2", str(copy), pairs[:40], tmp_path, runs=runs)
    for i, (cutoff, ratio, layers) in enumerate(RUNS):
        named = None if ratio == 1 else ",".join(map(str, layers))
        config = EngineConfig(
            model=path, dtype="float32", cutoff_layer=cutoff, compress_ratio=ratio, compress_layers=named
        )
        run = f"cutoff {cutoff}, ratio {ratio}, layers {layers}"
        _compare(run, await engines.scores(config, pairs[:40]), expected[str(i)])


@dataclass(frozen=True)
class Family:
    """A checkpoint and its class in colpali-engine. `prefix`, `suffix` and `page` are the words of
    transformers where they differ; `size` is that of a page that needs no resizing."""

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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.build.__name__)
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
    paths = [str(tmp_path / f"{i}.png") for i in range(len(pages))]
    for page, path in zip(pages, paths, strict=True):
        page.save(path)
    order = {
        "family": family.name, "checkpoint": checkpoint, "suffix": family.suffix, "page": family.page,
        "queries": [family.prefix + query for query in QUERIES], "pages": paths, "backend": backend,
    }  # fmt: skip
    expected = _asked(made("colpali"), "colpali_engine_side.py", tmp_path, **order)
    queries = await engine.embed_tokens(QUERIES, input_type="query")
    of_pages = await engine.embed_tokens(pages, input_type="document")
    for letter, embeddings in (("q", queries.embeddings), ("p", of_pages.embeddings)):
        for i, rows in enumerate(embeddings):
            np.testing.assert_allclose(rows, expected[f"{letter}{i}"], atol=1e-4)
    result = await engine.score(QUERIES[0], pages, cache="bypass")
    scores = [(expected["q0"] @ expected[f"p{i}"].T).max(axis=1).sum() for i in range(len(pages))]
    np.testing.assert_allclose(result.scores, scores, atol=1e-4)
