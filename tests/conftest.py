"""What all tests share: checkpoints that are built once, and real text."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import pytest
from hypothesis import settings

from maxsimd.bench.datasets import Pair, docstring_pairs
from tests import checkpoints

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    """200 pairs of real English: a docstring's first sentence and the rest of it."""
    return docstring_pairs()[:200]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def bert_cross_encoder(folder: Path) -> str:
    return checkpoints.bert_cross_encoder(folder / "bert-ce")


@pytest.fixture(scope="session")
def three_label_classifier(folder: Path) -> str:
    return checkpoints.bert_cross_encoder(folder / "bert-3", labels=3)


@pytest.fixture(scope="session")
def xlm_roberta_cross_encoder(folder: Path) -> str:
    return checkpoints.xlm_roberta_cross_encoder(folder / "xlmr-ce")


@pytest.fixture(scope="session")
def stanford_colbert(folder: Path) -> str:
    return checkpoints.stanford_colbert(folder / "stanford")


@pytest.fixture(scope="session")
def stanford_colbert_attending(folder: Path) -> str:
    return checkpoints.stanford_colbert(folder / "stanford-attend", attend=True)


@pytest.fixture(scope="session")
def native_multi_vector(folder: Path) -> str:
    return checkpoints.native_multi_vector(folder / "native")


@pytest.fixture(scope="session")
def qwen3_embedding(folder: Path) -> str:
    return checkpoints.qwen3_embedding(folder / "qwen3")
