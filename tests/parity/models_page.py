"""Writes the tables of docs/models.md, and all of docs/internals/models-proven.md but its prose.
Run `python -m tests.parity.models_page` after a change."""

import re
import tempfile
from functools import partial
from pathlib import Path

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint.detect import SUPPORTED
from maxsimd.engine.inspection import inspect_model, show
from tests.checkpoints import cross_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.families import FAMILIES, FORMS, LISTWISE, Family
from tests.parity.second_readers import READERS, VERSION, as_words

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PROOF = DOCS / "models.md", DOCS / "internals" / "models-proven.md"
PAGE_FAMILIES = [*FAMILIES, LISTWISE, *FORMS]

_SHORT = """\
| family | kind | for example | format |
| --- | --- | --- | --- |
"""
_PROVEN = f"""\
| family | scored by | published as | format | run | proven by | vLLM {VERSION} |
| --- | --- | --- | --- | --- | --- | --- |
"""
# The line before the inspections, which end the page.
_INSPECTIONS = "The default model, in float32:\n\n"


def kinds() -> str:
    rows = [f"| {', '.join(row.kinds)} | {row.named} | {row.form} |" for row in SUPPORTED]
    return "\n".join(["| scored by | architectures | form |", "| --- | --- | --- |", *rows])


def page() -> str:
    """docs/models.md, whose first two tables are generated."""
    tables = _short([*FAMILIES, LISTWISE]), _short(FORMS)
    return _with_tables(PAGE.read_text(encoding="utf-8"), *tables)


def proof(checkpoints: SharedCheckpoints) -> str:
    """docs/internals/models-proven.md, whose tables are generated, and all from the inspections on."""
    prose, _, _ = PROOF.read_text(encoding="utf-8").partition(_INSPECTIONS)
    prose = re.sub(r"vLLM [\d.]+ \(CPU", f"vLLM {VERSION} (CPU", prose)
    prose = _with_tables(prose, _proven([*FAMILIES, LISTWISE]), _proven(FORMS), f"{kinds()}\n")
    default = show(_inspected(EngineConfig(dtype="float32", device="cpu")))
    sections = [f"{prose}{_INSPECTIONS}```\n{default}\n```\n\nThe tests' checkpoints:\n"]
    for family in PAGE_FAMILIES:
        sections.append(_section(family.name, checkpoints(family.build), **family.settings))
    classifier = checkpoints(partial(cross_encoders.bert, labels=3))
    sections.append(_section("a classifier with three labels", classifier))
    shortened = checkpoints(language_models.mxbai_rerank_v2)
    template = "{{ query }} {{ document }}"
    sections.append(_section("mxbai-rerank-v2 with score_template", shortened, score_template=template))
    return "\n".join(sections)


def _with_tables(prose: str, *tables: str) -> str:
    """The prose with its first tables replaced."""
    parts = re.split(r"^((?:\|.*\n)+)", prose, flags=re.MULTILINE)
    parts[1 : 2 * len(tables) : 2] = tables
    return "".join(parts)


def _inspected(config: EngineConfig) -> dict[str, str | list[str]]:
    """The inspection of a model, without the rows about the machine."""
    rows = inspect_model(config)
    return {name: value for name, value in rows.items() if name not in ("device", "kernels")}


def _section(name: str, path: str, **settings: object) -> str:
    config = EngineConfig(model=path, dtype="float32", device="cpu", **settings)  # type: ignore[arg-type]
    rows = _inspected(config)
    del rows["model"]
    return f"### {name}\n\n```\n{show(rows)}\n```\n"


def _short(families: list[Family]) -> str:
    return _SHORT + "".join(f"| {' | '.join(_cells(family))} |\n" for family in families)


def _proven(families: list[Family]) -> str:
    return _PROVEN + "".join(map(_row, families))


def _cells(family: Family) -> list[str]:
    return [family.name, family.kind, family.published, family.format]


def _row(family: Family) -> str:
    run = "packed" if family.packed else "padded"
    run += ", causal" if family.causal else ""
    name = f"{family.kind}: {family.name}"
    test = "test_cross_encoders.py" if family is LISTWISE else f"test_families.py ...[{name}]"
    return f"| {' | '.join([*_cells(family), run, f'`{test}`', as_words(READERS[family.name])])} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        PROOF.write_text(proof(SharedCheckpoints(Path(folder))), encoding="utf-8")
