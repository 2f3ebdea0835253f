"""Fixtures of all tests: checkpoints, engines and real text."""

import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import pytest
import pytest_asyncio
import torch
from hypothesis import settings

from maxsimd.api.process import share_heaps
from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.engine.device.host import usable_cores
from maxsimd.engine.workers import give_back_memory
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction, sparse_encoders
from tests.checkpoints.shared import Build, SharedCheckpoints, shared_checkpoints
from tests.engines import Engines

# As servers do. Else a process that has run a thousand tests holds gigabytes that nothing uses.
share_heaps(usable_cores().threads)

# pytest gives handlers to each logger that does not propagate, six times a test. Torch has 57 of them.
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger):
        logger.propagate = True

settings.register_profile("default", deadline=None, print_blob=True, max_examples=50)
settings.load_profile("default")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.server.browser import chromium  # late: few tests need it

    yield from chromium()


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Recipes of checkpoints are shared by the workers of a run and the servers that they start."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path("~/.cache/matplotlib").expanduser()))  # its fonts
    os.environ["XDG_CACHE_HOME"] = str(shared_checkpoints(tmp_path_factory).folder.with_name("cache"))


@pytest.fixture(scope="session", autouse=True)
def one_certificate_authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """httpx loads 140 certificates for each client, which takes 0.1 s; no test needs them."""
    bundle = Path(certifi.where()).read_text("utf-8")
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(bundle[: bundle.index("-----END") + len("-----END CERTIFICATE-----\n")], "utf-8")
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    """An engine with a number of threads of its own sets torch's for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """Gives back what loaded models leave in the heaps. Imported modules are frozen meanwhile."""
    gc.freeze()
    yield
    gc.unfreeze()
    give_back_memory()


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    """200 pairs of real English: a docstring's first sentence and the rest of it."""
    return docstring_pairs()[:200]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """Engines that the tests of a module share, which must run on the module's event loop."""
    async with Engines() as engines:
        yield engines


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> SharedCheckpoints:
    """The path of the checkpoint that a builder makes: built once a run, and not to be changed."""
    return shared_checkpoints(tmp_path_factory)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For checkpoints that a test builds for itself."""
    return tmp_path_factory.mktemp("checkpoints")


def _path_of(build: Build) -> Any:
    return pytest.fixture(scope="session")(lambda checkpoints: checkpoints(build))


bert_cross_encoder = _path_of(cross_encoders.bert)
three_label_classifier = _path_of(partial(cross_encoders.bert, labels=3))
xlm_roberta_cross_encoder = _path_of(cross_encoders.xlm_roberta)
stanford_colbert = _path_of(late_interaction.stanford)
stanford_colbert_attending = _path_of(partial(late_interaction.stanford, attend=True))
native_multi_vector = _path_of(late_interaction.native)
qwen3_embedding = _path_of(bi_encoders.qwen3)
bge = _path_of(bi_encoders.bge)
bge_m3 = _path_of(bi_encoders.bge_m3)
gte = _path_of(bi_encoders.gte)
listwise = _path_of(language_models.jina_reranker_v3)
qwen3_reranker = _path_of(language_models.qwen3_reranker)
opensearch = _path_of(sparse_encoders.opensearch_v3)
splade = _path_of(sparse_encoders.splade)


@pytest.fixture
def group_of_one_core() -> Iterator[Path]:
    """A real control group whose quota is one core, where one can be made."""
    for folder, file, text in (
        ("/sys/fs/cgroup/cpu/maxsimd-test", "cpu.cfs_quota_us", "100000"),
        ("/sys/fs/cgroup/maxsimd-test", "cpu.max", "100000 100000"),
    ):
        group = Path(f"{folder}-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / file).exists():  # no control group, but a folder where none are mounted
            group.rmdir()
            continue
        (group / file).write_text(text)
        yield group
        group.rmdir()
        return
    pytest.skip("no control group can be made here")
