"""Runs the steps of a day on a GPU: `python -m maxsimd.bench.gpu.first_day`."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import click

from maxsimd.bench.gpu.first_day.predictions import PREDICTIONS, rows_of
from maxsimd.bench.gpu.first_day.stages import in_dry, steps
from maxsimd.bench.gpu.first_day.steps import Outcome, Step, run
from maxsimd.bench.gpu.first_day.table import figures_table, steps_table


@click.command()
@click.option("--out", type=click.Path(file_okay=False), default="build/first-day", show_default=True)
@click.option("--seconds", default=515.0, show_default=True, help="For all steps together.")
@click.option("--only", multiple=True, help="Only the step of this name; repeatable.")
@click.option("--dry", is_flag=True, help="Small and on a CPU, with interpreted kernels.")
def main(out: str, seconds: float, only: tuple[str, ...], dry: bool) -> None:
    """Runs all steps one after the other, then prints what came of them. Exits with 1 where one failed."""
    all_steps = in_dry(steps()) if dry else steps()
    names = [step.name for step in all_steps]
    if unknown := set(only) - set(names):
        raise click.UsageError(f"there is no step {', '.join(sorted(unknown))}; there are: {names}")
    chosen = [step for step in all_steps if not only or step.name in only]
    outcomes = run_steps(chosen, Path(out), seconds, "CPU" if dry else gpu_name())
    if not all(outcome.passed for outcome in outcomes):
        raise SystemExit(1)


def run_steps(chosen: Sequence[Step], folder: Path, seconds: float, gpu: str) -> list[Outcome]:
    """Runs all steps, whatever comes of each; writes first-day.json after every step, first-day.log as they
    print, and first-day.txt with the tables in the end, which are printed too."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    with (folder / "first-day.log").open("w", encoding="utf-8") as log:
        for step in chosen:
            _say(f"--- {step.name}: {' '.join(step.command)}", log)
            outcomes.append(run(step, ends - time.monotonic(), log))
            _say(f"--- {step.name}: {outcomes[-1].verdict}, {outcomes[-1].seconds:.1f} s", log)
            _write(folder / "first-day.json", gpu, outcomes)
    lines = [f"first day on {gpu}", *steps_table(outcomes)]
    lines += ["", *figures_table(outcomes, PREDICTIONS, gpu)]
    text = "\n".join(lines).rstrip() + "\n"
    (folder / "first-day.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="", flush=True)
    return outcomes


def gpu_name() -> str:
    """What the driver calls the first GPU, without a context on it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown GPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (ran.stdout.splitlines() or ["unknown GPU"])[0].strip()


def _say(line: str, log: IO[str]) -> None:
    print(line, flush=True)
    print(line, file=log, flush=True)


def _write(path: Path, gpu: str, outcomes: Sequence[Outcome]) -> None:
    found = {name: value for outcome in outcomes for name, value in outcome.found.items()}
    rows = [
        asdict(row.prediction)
        | {"predicted": row.predicted, "measured": row.measured, "ratio": row.ratio, "met": row.is_met}
        for row in rows_of(PREDICTIONS, found, gpu)
    ]
    steps = [asdict(outcome) | {"verdict": outcome.verdict} for outcome in outcomes]
    content = {"gpu": gpu, "steps": steps, "predictions": rows}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
