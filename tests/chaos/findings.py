"""The findings of a program, and how they are printed."""

from collections.abc import Sequence
from dataclasses import dataclass

Row = Sequence[object]
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Found:
    tables: Sequence[Sequence[Row]]
    broken: Sequence[str]

    def __str__(self) -> str:
        shown = self.broken[:_SHOWN]
        return "\n\n".join([*map(table, self.tables), f"broken promises: {len(self.broken)}", *shown])


def table(rows: Sequence[Row]) -> str:
    shown = ([_shown(cell) for cell in row] for row in rows)
    return "\n".join(f"{name:40}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in shown)


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 100 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which that share of them lies; None where there are none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
