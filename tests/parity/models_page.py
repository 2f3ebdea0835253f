"""Writes the tables and inspections of docs/models.md: `python -m tests.parity.models_page`."""

import re
import tempfile
from functools import partial
from pathlib import Path

from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint.served import as_markdown
from maxsimd.engine.inspection import inspect_model, show
from tests.checkpoints import cross_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.families import FAMILIES, FORMS, LISTWISE, Family
from tests.parity.second_readers import READERS, VERSION, as_words

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PAGE_FAMILIES = [*FAMILIES, LISTWISE, *FORMS]

_HEAD = f"""\
| family | scored by | published as | format | run | proven by | vLLM {VERSION} |
| --- | --- | --- | --- | --- | --- | --- |
"""
# What stands before the inspections, which end the page.
_INSPECTIONS = "Of the default model, in float32:\n\n"


def page(checkpoints: SharedCheckpoints) -> str:
    """The whole page, whose first three tables are generated, and all from the inspections on."""
    prose, _, _ = PAGE.read_text(encoding="utf-8").partition(_INSPECTIONS)
    prose = re.sub(r"vLLM [\d.]+ \(CPU", f"vLLM {VERSION} (CPU", prose)
    parts = re.split(r"^((?:\|.*\n)+)", prose, flags=re.MULTILINE)
    parts[1:6:2] = _table([*FAMILIES, LISTWISE]), f"{as_markdown()}\n", _table(FORMS)
    default = show(_inspected(EngineConfig(dtype="float32", device="cpu")))
    sections = [f"{''.join(parts)}{_INSPECTIONS}```\n{default}\n```\n\nOf the tests' checkpoints:\n"]
    for family in PAGE_FAMILIES:
        sections.append(_section(family.name, checkpoints(family.build), **family.settings))
    classifier = checkpoints(partial(cross_encoders.bert, labels=3))
    sections.append(_section("a classifier with three labels", classifier))
    shortened = checkpoints(language_models.mxbai_rerank_v2)
    template = "{{ query }} {{ document }}"
    sections.append(_section("mxbai-rerank-v2 with --score-template", shortened, score_template=template))
    return "\n".join(sections)


def _inspected(config: EngineConfig) -> dict[str, str | list[str]]:
    """What is said of a model, without what is said of the machine."""
    rows = inspect_model(config)
    return {name: value for name, value in rows.items() if name not in ("device", "kernels")}


def _section(name: str, path: str, **settings: object) -> str:
    config = EngineConfig(model=path, dtype="float32", device="cpu", **settings)  # type: ignore[arg-type]
    rows = _inspected(config)
    del rows["model"]
    return f"### {name}\n\n```\n{show(rows)}\n```\n"


def _table(families: list[Family]) -> str:
    return _HEAD + "".join(map(_row, families))


def _row(family: Family) -> str:
    run = "packed" if family.packed else "padded"
    run += ", causal" if family.causal else ""
    name = f"{family.kind}: {family.name}"
    test = "test_cross_encoders.py" if family is LISTWISE else f"test_families.py ...[{name}]"
    cells = [family.name, family.kind, family.published, family.format, run, f"`{test}`"]
    return f"| {' | '.join([*cells, as_words(READERS[family.name])])} |\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(SharedCheckpoints(Path(folder))), encoding="utf-8")
