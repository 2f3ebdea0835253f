"""vLLM in a process of its own environment, and what it is asked."""

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler import Sequence
from tests.parity.second_readers import Compared, Told

Numbers = NDArray[np.float32]

_SIDE = Path(__file__).with_name("vllm_side.py")
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_TASKS: dict[Compared, str] = {
    "embeddings": "embed",
    "tokens": "token_embed",
    "logits": "classify",
    "words": "embed",
    "own words": "token_classify",
    "listwise": "token_embed",
}


class Vllm:
    """A process that has imported vLLM, and forks one for each order."""

    def __init__(self, python: str, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        with (folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(_SIDE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | _ENVIRONMENT,
            )
        self.version = self._line().strip()

    def run(
        self, checkpoint: str, compared: Compared, told: Told, inputs: list["Input"], activation: bool
    ) -> list[Numbers]:
        """What vLLM gives for each input."""
        output = self._folder / f"{next(self._numbers)}.npz"
        order = {
            "checkpoint": checkpoint,
            "task": _TASKS[compared],
            "overrides": dict(told.overrides),
            "stand_in": told.stand_in,
            "pooler": dict(told.pooler),
            "inputs": [{"ids": each.ids, "second": each.second, "texts": each.texts} for each in inputs],
            "activation": activation,
            "output": str(output),
        }
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = json.loads(self._line())
        assert answer is None, answer
        with np.load(output) as found:
            return [found[str(i)] for i in range(len(inputs))]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "vLLM's process has ended"
        return line


@dataclass(frozen=True, slots=True)
class Input:
    """A text or pair by its token ids; the `second` text of a pair begins at this token, where types are
    told apart. Of the rows that vLLM gives `rows` are ours, in our order. Of `texts`, documents and then
    their query, vLLM makes the one prompt by itself."""

    ids: list[int]
    second: int | None
    rows: list[int]
    texts: list[str] | None = None

    @classmethod
    def of(cls, sequence: Sequence, takes_types: bool) -> "Input":
        tokens = sequence.payload.tokens
        types = tokens.type_ids if takes_types else None
        second = None if types is None or not np.any(types) else int(np.argmax(types))
        rows = tokens.pooled_positions
        rows = np.arange(len(tokens)) if rows is None else rows
        # Of tokens that are not attended to vLLM knows nothing: all that attend are before them.
        within = [int(row) for row in rows if row < tokens.num_attended]
        return cls(tokens.ids[: tokens.num_attended].tolist(), second, within)
