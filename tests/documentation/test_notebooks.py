"""The notebooks run, with outputs of the kinds that they show. `make notebooks` writes new outputs."""

import copy
import os
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.documentation.test_code_blocks import ROOT

NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


def _outputs(notebook: Any) -> list[list[list[str]]]:
    """The kinds of each cell's outputs, without texts in place of tables and pictures."""
    cells = [cell.get("outputs", []) for cell in notebook.cells]
    for data in (each.get("data", {}) for outputs in cells for each in outputs):
        if len(data) > 1:
            data.pop("text/plain", None)
    return [[sorted(each.get("data", [each.get("name", "")])) for each in outputs] for outputs in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Any) -> None:
    shown = nbformat.read(path, as_version=4)
    ran = copy.deepcopy(shown)
    NotebookClient(ran, timeout=120, record_timing=False).execute()
    found = _outputs(ran)
    if os.environ.get("MAXSIMD_WRITES_NOTEBOOKS"):
        nbformat.write(ran, path)
    else:
        assert found == _outputs(shown)
