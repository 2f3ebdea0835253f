"""What all tests share: checkpoints that are built once, and real text."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import pytest
from hypothesis import settings

from maxsimd.bench.datasets import Pair, docstring_pairs
from tests.checkpoints import bi_encoders, cross_encoders, late_interaction

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
    return cross_encoders.bert(folder / "bert-ce")


@pytest.fixture(scope="session")
def three_label_classifier(folder: Path) -> str:
    return cross_encoders.bert(folder / "bert-3", labels=3)


@pytest.fixture(scope="session")
def xlm_roberta_cross_encoder(folder: Path) -> str:
    return cross_encoders.xlm_roberta(folder / "xlmr-ce")


@pytest.fixture(scope="session")
def stanford_colbert(folder: Path) -> str:
    return late_interaction.stanford(folder / "stanford")


@pytest.fixture(scope="session")
def stanford_colbert_attending(folder: Path) -> str:
    return late_interaction.stanford(folder / "stanford-attend", attend=True)


@pytest.fixture(scope="session")
def native_multi_vector(folder: Path) -> str:
    return late_interaction.native(folder / "native")


@pytest.fixture(scope="session")
def qwen3_embedding(folder: Path) -> str:
    return bi_encoders.qwen3(folder / "qwen3")
