"""Runs the steps of a day on a GPU, and compares them with predictions: `python -m
maxsimd.bench.gpu.first_day`.

Predictions come from arithmetic on shapes and compiled code, from published figures, or are aims. None is
changed after a measurement: a table of misses is a result too."""

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import click

from maxsimd.bench.gpu.first_day.processes import Outcome, Step, run

_HERE = "maxsimd.bench.gpu.first_day"

# The environment of steps that use no GPU.
_DRY = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _steps() -> list[Step]:
    """The most important first: all together may take nine minutes, after which the last are cut short."""
    return [
        _ours("machine", 30, "measure", "machine"),
        _ours("smallest", 105, "smallest"),
        # The other packages choose among many variants of their kernels first.
        _ours("MaxSim beside others", 160, "measure", "kernels", "--rounds", "12"),
        _ours("forward, jina", 70, "measure", "forward", "jina"),
        _ours("serving", 85, "measure", "serving", "--requests", "2000"),
        _ours("forward, xlm-roberta", 55, "measure", "forward", "xlm-roberta"),
        _ours("forward, modernbert", 50, "measure", "forward", "modernbert"),
        _ours("tiles of MaxSim", 60, "measure", "tiles", "--rounds", "8"),
    ]


def _in_dry(chosen: list[Step]) -> list[Step]:
    """The same steps, small and on a CPU."""
    return [
        Step(step.name, (*step.command, "--dry"), 3 * step.seconds, _DRY | dict(step.environment))
        for step in chosen
    ]


def _ours(name: str, seconds: float, module: str, *arguments: str) -> Step:
    return Step(name, (sys.executable, "-m", f"{_HERE}.{module}", *arguments), seconds)


_ARITHMETIC, _PUBLISHED, _AIM = "arithmetic", "published", "aim"
_SEEN = "seen on such a GPU"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The number that a figure was predicted to reach (`at least`) or not to exceed (`at most`), on an H100
    and on an H200."""

    figure: str
    unit: str
    wanted: Literal["at least", "at most"]
    h100: float
    h200: float
    source: str

    def for_gpu(self, gpu: str) -> float:
        """The number for a GPU of this name; for any but an H200, that of the H100."""
        return self.h200 if "H200" in gpu else self.h100


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction beside its measurement."""

    prediction: Prediction
    predicted: float
    measured: float

    @property
    def figure(self) -> str:
        return self.prediction.figure

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 for 0 over 0."""
        if self.predicted == 0:
            return 1.0 if self.measured == 0 else math.inf
        return self.measured / self.predicted

    @property
    def is_met(self) -> bool:
        is_least = self.prediction.wanted == "at least"
        return self.measured >= self.predicted if is_least else self.measured <= self.predicted


def _least(figure: str, unit: str, h100: float, h200: float, source: str = _ARITHMETIC) -> Prediction:
    return Prediction(figure, unit, "at least", h100, h200, source)


def _most(figure: str, unit: str, h100: float, h200: float, source: str = _ARITHMETIC) -> Prediction:
    return Prediction(figure, unit, "at most", h100, h200, source)


_COLBERT = "MaxSim: ColBERT, 10,000 documents of 180 tokens"
_COLPALI = "MaxSim: ColPali, 500 pages of 1,024 tokens"
_QUERY_OF_64 = "MaxSim: a query of 64 tokens, 10,000 documents of 180"
_LONG_DOCUMENTS = "MaxSim: published, 10,000 documents of 300 tokens"
_PAGES = "MaxSim: published, 1,000 pages of 1,024 tokens"
_SERVING = "2,000 requests of one document, 64 at a time, 2,048 tokens"
_FASTER = "times_as_fast_as_the_best_other"

PREDICTIONS = (
    _least("limits: product_tflops", "TFLOP/s", 718, 788, _SEEN),
    _least("limits: copy_tbytes_per_s", "TB/s", 3.0, 4.3, _SEEN),
    _least("limits: read_tbytes_per_s", "TB/s", 3.1, 4.4, _PUBLISHED),
    _most("kernels: cases that failed", "cases", 0, 0, _AIM),
    # The better package is within 10% of its published figure, or the harness is wrong.
    _most(f"{_LONG_DOCUMENTS}: late-interaction-kernels_ms", "ms", 0.2450, 0.172, _PUBLISHED),
    _most(f"{_LONG_DOCUMENTS}: flash-maxsim_ms", "ms", 0.2473, 0.174, _PUBLISHED),
    _most(f"{_PAGES}: late-interaction-kernels_ms", "ms", 0.6957, 0.6957, _PUBLISHED),
    _most(f"{_PAGES}: flash-maxsim_ms", "ms", 0.5684, 0.5684, _PUBLISHED),
    # 461 MB, each byte read once from memory, and two dependent loads before the first tile.
    _most(f"{_COLBERT}: maxsimd_ms", "ms", 0.157, 0.112),
    _least(f"{_COLBERT}: {_FASTER}", "times", 1.0, 1.0, _AIM),
    _most(f"{_COLBERT}, in int8: maxsimd_ms", "ms", 0.105, 0.09),
    _least(f"{_COLBERT}, in int8: {_FASTER}", "times", 1.0, 1.0, _AIM),
    # 134 GFLOP, for a kernel that compared one tile while it multiplied the next.
    _most(f"{_COLPALI}: maxsimd_ms", "ms", 0.195, 0.195),
    _least(f"{_COLPALI}: {_FASTER}", "times", 1.3, 1.3, _AIM),
    _most(f"{_COLPALI}, in int8: maxsimd_ms", "ms", 0.21, 0.21),
    _least(f"{_COLPALI}, in int8: {_FASTER}", "times", 1.3, 1.3, _AIM),
    _most(f"{_QUERY_OF_64}: maxsimd_ms", "ms", 0.162, 0.125),
    _least(f"{_QUERY_OF_64}: {_FASTER}", "times", 1.0, 1.0, _AIM),
    # 24 layers: 9.9 TFLOP of products at 655 TFLOP/s, attention at 400 to 500, norms and one rotation.
    _least("forward, jina, as it is, 128 x 128 tokens: tokens_per_s", "tokens/s", 799e3, 830e3),
    _least("forward, jina, as it is, 32 x 512 tokens: tokens_per_s", "tokens/s", 759e3, 785e3),
    _least("forward, jina, as it is, 16 x 1,024 tokens: tokens_per_s", "tokens/s", 691e3, 712e3),
    _least("forward, jina, as it is, 8 x 2,048 tokens: tokens_per_s", "tokens/s", 594e3, 610e3),
    _most("forward, jina, as it is, 16 x 1,024 tokens: launches_a_layer", "launches", 9, 9, _AIM),
    _most("forward, jina, as it is, 1 x 512 tokens: ms", "ms", 1.6, 1.5),
    _most("forward, jina, as it is, 2 x 1,024 tokens: ms", "ms", 3.6, 3.5),
    _least("forward, xlm-roberta, as it is, 16 x 1,024 tokens: tokens_per_s", "tokens/s", 725e3, 745e3),
    _least("forward, xlm-roberta, as it is, 8 x 2,048 tokens: tokens_per_s", "tokens/s", 618e3, 635e3),
    _least(f"{_SERVING}: tokens_per_s", "tokens/s", 331_638, 331_638, _PUBLISHED),
    _least(f"{_SERVING}: tokens_per_s", "tokens/s", 620e3, 640e3),
    _most(f"{_SERVING}: p99_of_mean", "times", 1.3, 1.3, _AIM),
)


def _rows(outcomes: Iterable[Outcome], gpu: str) -> list[Row]:
    """The predictions whose measurement was found."""
    found = {name: value for outcome in outcomes for name, value in outcome.found.items()}
    rows = []
    for prediction in PREDICTIONS:
        measured = found.get(prediction.figure)
        if isinstance(measured, int | float):
            rows.append(Row(prediction, prediction.for_gpu(gpu), float(measured)))
    return rows


def _steps_table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a step: verdict, exit status, seconds; below it, the engine's warnings."""
    width = max([len(outcome.name) for outcome in outcomes], default=0)
    lines = [f"{'step':<{width}}  {'':<9}  {'exit':>4}  {'seconds':>7}"]
    for outcome in outcomes:
        status = "-" if outcome.status is None else str(outcome.status)
        lines.append(f"{outcome.name:<{width}}  {outcome.verdict:<9}  {status:>4}  {outcome.seconds:>7.1f}")
        lines += [f"    {warning}" for warning in outcome.warnings]
    return lines


def _figures_table(outcomes: Iterable[Outcome], gpu: str) -> list[str]:
    """A line for each prediction that one of these steps measured."""
    rows = _rows(outcomes, gpu)
    if not rows:
        return []
    width = max(len(row.figure) for row in rows)
    header = (
        f"{'figure':<{width}}  {'unit':<9}  {'predicted':>11}  {'measured':>9}  {'ratio':>6}  {'':<6}  source"
    )
    return [header, *(_line(row, width) for row in rows)]


def _line(row: Row, width: int) -> str:
    prediction = row.prediction
    sign = ">=" if prediction.wanted == "at least" else "<="
    return (
        f"{row.figure:<{width}}  {prediction.unit:<9}  {sign + f'{row.predicted:g}':>11}"
        f"  {row.measured:>9.4g}  {row.ratio:>6.2f}  {'met' if row.is_met else 'MISSED':<6}"
        f"  {prediction.source}"
    )


@click.command()
@click.option("--out", type=click.Path(file_okay=False), default="build/first-day", show_default=True)
@click.option("--seconds", default=515.0, show_default=True, help="For all steps together.")
@click.option("--only", multiple=True, help="Only the step of this name; repeatable.")
@click.option("--dry", is_flag=True, help="Small and on a CPU, with interpreted kernels.")
def main(out: str, seconds: float, only: tuple[str, ...], dry: bool) -> None:
    """Runs all steps one after the other, then prints what came of them. Exits with 1 where one failed."""
    all_steps = _in_dry(_steps()) if dry else _steps()
    names = [step.name for step in all_steps]
    if unknown := set(only) - set(names):
        raise click.UsageError(f"there is no step {', '.join(sorted(unknown))}; there are: {names}")
    chosen = [step for step in all_steps if not only or step.name in only]
    outcomes = run_steps(chosen, Path(out), seconds, "CPU" if dry else _gpu_name())
    if not all(outcome.passed for outcome in outcomes):
        raise SystemExit(1)


def run_steps(chosen: Sequence[Step], folder: Path, seconds: float, gpu: str) -> list[Outcome]:
    """Runs all steps, also after failures. Writes first-day.json after every step, first-day.log as they
    print, and first-day.txt with the tables at the end, which are printed too."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    with (folder / "first-day.log").open("w", encoding="utf-8") as log:
        for step in chosen:
            _say(f"--- {step.name}: {' '.join(step.command)}", log)
            outcomes.append(run(step, ends - time.monotonic(), log))
            _say(f"--- {step.name}: {outcomes[-1].verdict}, {outcomes[-1].seconds:.1f} s", log)
            _write(folder / "first-day.json", gpu, outcomes)
    lines = [f"first day on {gpu}", *_steps_table(outcomes)]
    lines += ["", *_figures_table(outcomes, gpu)]
    text = "\n".join(lines).rstrip() + "\n"
    (folder / "first-day.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="", flush=True)
    return outcomes


def _gpu_name() -> str:
    """The driver's name of the first GPU, without a context on it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown GPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (ran.stdout.splitlines() or ["unknown GPU"])[0].strip()


def _say(line: str, log: IO[str]) -> None:
    print(line, flush=True)
    print(line, file=log, flush=True)


def _write(path: Path, gpu: str, outcomes: Sequence[Outcome]) -> None:
    rows = [
        asdict(row.prediction)
        | {"predicted": row.predicted, "measured": row.measured, "ratio": row.ratio, "met": row.is_met}
        for row in _rows(outcomes, gpu)
    ]
    steps = [asdict(outcome) | {"verdict": outcome.verdict} for outcome in outcomes]
    content = {"gpu": gpu, "steps": steps, "predictions": rows}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
