"""A stage's results as tables: its steps, and what was predicted beside what was measured."""

from collections.abc import Iterable, Sequence

from maxsimd.bench.gpu.first_day.predictions import Prediction, Row, rows_of
from maxsimd.bench.gpu.first_day.steps import Outcome


def steps_table(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a step: verdict, exit status, seconds; below it, the engine's warnings."""
    width = max([len(outcome.name) for outcome in outcomes], default=0)
    lines = [f"{'step':<{width}}  {'':<9}  {'exit':>4}  {'seconds':>7}"]
    for outcome in outcomes:
        status = "-" if outcome.status is None else str(outcome.status)
        lines.append(f"{outcome.name:<{width}}  {outcome.verdict:<9}  {status:>4}  {outcome.seconds:>7.1f}")
        lines += [f"    {warning}" for warning in outcome.warnings]
    return lines


def figures_table(outcomes: Iterable[Outcome], predictions: Iterable[Prediction], gpu: str) -> list[str]:
    """A line for each prediction that one of these steps measured."""
    found = {name: value for outcome in outcomes for name, value in outcome.found.items()}
    rows = rows_of(predictions, found, gpu)
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
