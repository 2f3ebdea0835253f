"""Reads what became of a part's mutants; survivors that `survivors.md` explains are set apart."""

import json
import os
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

EXPLANATIONS = Path(__file__).parent / "survivors.md"

_KILLED = {1, 3}
_TIMED_OUT = {-24, 24, 36, 152}
_SURVIVED = {0}
_UNTESTED = {5, 33}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutant by the function that it is in and the lines that differ, which outlive a change elsewhere."""

    function: str
    difference: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    part: str
    killed: int
    timed_out: int
    equivalent: list[Mutant]
    explained: list[Mutant]
    survived: list[Mutant]
    untested: list[Mutant]
    broken: list[str]

    @property
    def score(self) -> float:
        """The share that tests notice, of the mutants that mean something else than the original."""
        noticed = self.killed + self.timed_out
        alive = len(self.explained) + len(self.survived) + len(self.untested) + len(self.broken)
        return noticed / max(1, noticed + alive)

    def summary(self) -> str:
        return (
            f"{self.part:20} {self.score:6.1%}  killed {self.killed}, timed out {self.timed_out}, "
            f"survived {len(self.survived)}, without a test {len(self.untested)}, "
            f"explained {len(self.explained)}, equivalent {len(self.equivalent)}, broken {len(self.broken)}"
        )

    def text(self) -> str:
        lines = [self.summary(), ""]
        for title, mutants in (("survived", self.survived), ("without a test", self.untested)):
            for mutant in mutants:
                lines += [f"### `{mutant.function}` ({title})", "```diff", *mutant.difference, "```"]
        lines += [f"broken: {name}" for name in self.broken]
        return "\n".join(lines) + "\n"


def explanations(part: str) -> dict[Mutant, str]:
    """The mutants that `survivors.md` explains under a part's heading, with the first word of the reason."""
    found: dict[Mutant, str] = {}
    here, function, reason, difference = "", "", "", list[str]()
    within = False
    for line in EXPLANATIONS.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            if within and here == part:
                found[Mutant(function, tuple(difference))] = reason
            within, difference = not within, []
        elif within:
            difference.append(line)
        elif line.startswith("## "):
            here = line.removeprefix("## ").strip()
        elif line.startswith("### "):
            function = line.removeprefix("### ").strip("` ")
        elif line.startswith(("Equivalent:", "Left:")):
            reason = line.partition(":")[0]
    return found


def _described(name: str, path: Path) -> Mutant:
    """mutmut looks for mutants below the current folder."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    module, _, function = name.partition(".x")
    function = function.rpartition("__mutmut_")[0].strip("_ǁ").replace("ǁ", ".")
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    changed = [line[0] + " " + line[1:].strip() for line in lines if line.startswith(("+", "-"))]
    return Mutant(f"{module}.{function}", tuple(changed))


def read(part: str, workspace: Path) -> Report:
    """The results that mutmut has left in a part's workspace."""
    from mutmut.configuration import reset_config

    known = explanations(part)
    killed = timed_out = 0
    by_reason: dict[str, list[Mutant]] = {"Equivalent": [], "Left": [], "": []}  # as Report has them
    untested: list[Mutant] = []
    broken: list[str] = []
    with chdir(workspace):
        reset_config()
        for meta in sorted(Path("mutants").rglob("*.meta")):
            path = meta.relative_to("mutants").with_suffix("")
            for name, status in json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"].items():
                if status in _KILLED:
                    killed += 1
                elif status in _TIMED_OUT:
                    timed_out += 1
                elif status in _SURVIVED | _UNTESTED:
                    mutant = _described(name, path)
                    reason = known.get(mutant, "")
                    if status in _UNTESTED and not reason:
                        untested.append(mutant)
                    else:
                        by_reason[reason].append(mutant)
                else:
                    broken.append(f"{name} ended with {status}")
    return Report(part, killed, timed_out, *by_reason.values(), untested, broken)


def run(workspace: Path, workers: int) -> None:
    """Has mutmut make the mutants of a workspace and try the tests on each."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # One thread each: workers share the cores, and threads do not outlive a fork.
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(workers)]
    log = workspace / "mutmut.log"
    with log.open("wb") as out:
        ran = subprocess.run(command, cwd=workspace, env=environment, stdout=out, stderr=out, check=False)
    if ran.returncode != 0:
        said = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise SystemExit(f"{said}\nmutmut failed: see {log}")
