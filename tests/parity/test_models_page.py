"""The page of models says what is so."""

import json
import re

import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.engine.checkpoint.detect import SUPPORTED
from maxsimd.engine.checkpoint.files import embedded_model_path
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.models_page import PAGE, PAGE_FAMILIES, PROOF, kinds, page, proof
from tests.parity.second_readers import READERS, as_words


def test_the_tables_are_those_of_the_families() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run: python -m tests.parity.models_page"
    assert kinds() in PROOF.read_text(encoding="utf-8"), "run: python -m tests.parity.models_page"


@pytest.mark.exhaustive
def test_the_proof_is_what_inspecting_every_checkpoint_prints(checkpoints: SharedCheckpoints) -> None:
    written = PROOF.read_text(encoding="utf-8")
    assert proof(checkpoints) == written, "run: python -m tests.parity.models_page"


def test_each_family_has_one_line_about_a_second_reader() -> None:
    names = [family.name for family in PAGE_FAMILIES]
    assert len(names) == len({*names}), "lines go by the names of families"
    assert {*names} == {*READERS}
    assert not any({"|", "\n"} & {*as_words(reader)} for reader in READERS.values()), "it stands in a table"


def test_the_command_prints_what_the_page_shows() -> None:
    shown = CliRunner().invoke(main, ["inspect", "--dtype", "float32"])
    assert shown.exit_code == 0
    *of_model, device, kernels = shown.stdout.strip().split("\n")
    assert "\n".join(of_model) in PROOF.read_text(encoding="utf-8")
    assert re.fullmatch(r"device +(cpu|cuda)", device)
    assert re.fullmatch(r"kernels +(plain torch: .+|attention by \w+, MaxSim by \w+)", kernels)
    as_json = CliRunner().invoke(main, ["inspect", embedded_model_path(), "--json"])
    assert '"architecture": "BertModel"' in as_json.stdout


def test_the_command_lists_what_is_served() -> None:
    listed = CliRunner().invoke(main, ["inspect", "--supported"]).stdout
    assert len(listed.splitlines()) == len(SUPPORTED)
    assert "JinaForRanking" in listed
    as_json = json.loads(CliRunner().invoke(main, ["inspect", "--supported", "--json"]).stdout)
    assert [row["form"] for row in as_json] == [row.form for row in SUPPORTED]
