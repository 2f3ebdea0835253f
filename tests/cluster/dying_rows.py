"""A scorer whose engine dies. Actors import it by its name."""

from pathlib import Path
from typing import Any

from maxsimd.api.cluster.data import ScoreRows


class DyingRows(ScoreRows):
    """The engine of the first one dies at its first table; a file says that this has been."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self._marker = Path(marker)

    def __call__(self, table: Any) -> Any:
        if not self._marker.exists():
            self._marker.touch()
            self._engine._engine._died("of old age", None)
        return super().__call__(table)
