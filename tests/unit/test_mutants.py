"""The mutation tester: what it names exists, and it reads explanations and decorated functions rightly."""

from pathlib import Path

import pytest

from tests.mutants import report, workspace
from tests.mutants.report import Mutant, Report

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", workspace.parts().values(), ids=lambda part: part.name)
def test_every_part_names_folders_that_exist(part: workspace.Part) -> None:
    assert all((ROOT / folder).is_dir() for folder in part.source)


def test_calling_a_decorator_afterwards_means_the_same() -> None:
    source = (
        "class A:\n"
        "    @property\n"
        "    def one(self):\n"
        "        return 1\n"
        "\n"
        "    @staticmethod\n"
        "    def two():\n"
        "        return 2\n"
        "\n"
        "    @property\n"
        "    def three(self):\n"
        "        return 3\n"
    )
    changed = workspace.undecorated(source)
    assert changed.count("@property") == 0
    assert changed.count("@staticmethod") == 1
    names: dict[str, type] = {}
    exec(changed, names)
    made = names["A"]()
    assert (made.one, made.two(), made.three) == (1, 2, 3)


def test_explanations_go_with_part_function_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "# Title\n\n## scheduler\n\n### `maxsimd.scheduler.f`\n\nEquivalent: it cannot matter.\n\n"
        "```diff\n- a = 1\n+ a = 2\n```\n```diff\n- b\n+ c\n```\n\n"
        "Left: too slow.\n\n```diff\n- d\n+ e\n```\n\n"
        "## pooling\n\n### `maxsimd.pooling.g`\n\nEquivalent: nor this.\n\n```diff\n- a = 1\n+ a = 2\n```\n"
    )
    file = tmp_path / "survivors.md"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(report, "EXPLANATIONS", file)
    assert report.explanations("scheduler") == {
        Mutant("maxsimd.scheduler.f", ("- a = 1", "+ a = 2")): "Equivalent",
        Mutant("maxsimd.scheduler.f", ("- b", "+ c")): "Equivalent",
        Mutant("maxsimd.scheduler.f", ("- d", "+ e")): "Left",
    }
    assert list(report.explanations("pooling").values()) == ["Equivalent"]


def test_every_part_of_which_mutants_live_has_its_explanations() -> None:
    """A fence that is not closed would hide all that follows."""
    text = report.EXPLANATIONS.read_text(encoding="utf-8")
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert fences == ["```diff", "```"] * (len(fences) // 2)
    explained = sum(len(report.explanations(part)) for part in workspace.parts())
    assert explained == len(fences) // 2, "one stands twice, or under no part"


def test_equivalent_mutants_do_not_count_and_all_others_do() -> None:
    some = [Mutant("f", ())]
    made = Report("part", 6, 1, some * 5, some, some, some * 3, ["broken"])
    assert made.score == 7 / 13
    assert made.summary().split()[:2] == ["part", "53.8%"]
