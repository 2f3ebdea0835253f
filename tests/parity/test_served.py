"""The table of what is served: true of every family that is proven, and what the command and errors list."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.checkpoint.load import load_model
from maxsimd.engine.checkpoint.served import SERVED, row_of
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.families import FAMILIES, Family
from tests.parity.selection import families


@families(FAMILIES)
def test_every_family_is_in_the_table(family: Family, checkpoints: SharedCheckpoints) -> None:
    architecture = read_files(checkpoints(family.build), None).architecture
    assert family.kind in row_of(architecture).kinds, architecture


def test_the_command_lists_the_table() -> None:
    listed = CliRunner().invoke(main, ["inspect", "--supported"]).stdout
    assert len(listed.splitlines()) == len(SERVED)
    assert "JinaForRanking" in listed
    as_json = json.loads(CliRunner().invoke(main, ["inspect", "--supported", "--json"]).stdout)
    assert [row["form"] for row in as_json] == [row.form for row in SERVED]


def test_the_error_for_an_unknown_architecture_lists_the_table(tmp_path: Path) -> None:
    config = {"model_type": "nothing", "architectures": ["NothingModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelLoadError) as raised:
        load_model(EngineConfig(model=str(tmp_path)), torch.device("cpu"))
    message = str(raised.value)
    assert "NothingModel" in message
    for row in SERVED:
        assert all(name in message for name in row.architectures if name != "*")


def test_a_type_newer_than_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "gte", "architectures": ["GteModel"], "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("maxsimd.engine.checkpoint.support.CONFIG_MAPPING", {})
    version = re.escape(transformers.__version__)
    with pytest.raises(ModelLoadError, match=f"'gte', which transformers {version} does not have"):
        load_model(EngineConfig(model=str(tmp_path)), torch.device("cpu"))
    config = {"model_type": "new", "architectures": ["NewModel"], "auto_map": {}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=f"read as 'gte'; transformers {version} does not.*newer one"):
        load_model(EngineConfig(model=str(tmp_path)), torch.device("cpu"))
