"""What a program is told on the command line."""

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """`seconds` and `requests` None leave it to the program how long it runs."""

    seconds: float | None = None
    requests: int | None = None
    seed: int = 0
    model: str | None = None
    samples: Path | None = None
    plot: Path | None = None
    log: Path | None = None

    def checkpoint(self) -> str:
        """The model's folder: the one that was named, or a small late-interaction checkpoint with random
        weights, which is made now."""
        if self.model is not None:
            return self.model
        from tests.checkpoints.late_interaction import stanford

        folder = Path(tempfile.mkdtemp(prefix="maxsimd-chaos-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return stanford(folder)
