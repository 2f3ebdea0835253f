"""One CUDA graph: static memory for a step's inputs and metadata, and what it computes from them."""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.base import StaticMetadata
from maxsimd.engine.execution.graph_recorder import Recorder
from maxsimd.engine.execution.layout import PackedBatch
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.static_inputs import Field, StaticInputs


class StaticGraph:
    """The graph for one size of steps. Its replays write to `hidden` [rows, hidden], which is part of what
    other graphs write to."""

    def __init__(
        self,
        runner: PackedRunner,
        static: StaticMetadata,
        batch: PackedBatch,
        hidden: torch.Tensor,
        recorder: Recorder,
    ) -> None:
        """Captures it with a step. Raises ValueError for one that its metadata is not made for."""
        self._runner = runner
        self._static = static
        self._hidden = hidden
        names = tuple(runner.inputs_of(batch))
        fields = {name: Field((len(hidden),), torch.int64) for name in names}
        fields |= {name: Field(shape, torch.int32) for name, shape in static.shapes.items()}
        self._inputs = StaticInputs(fields, hidden.device)
        tensors = self._inputs.tensors
        metadata = static.over(tensors)
        if not self._load(batch):
            raise ValueError("a graph does not hold the step that it is captured with")

        def run() -> None:
            hidden.copy_(runner.run({name: tensors[name] for name in names}, metadata))

        self.again = recorder.capture(run)

    def replay(self, batch: PackedBatch) -> torch.Tensor | None:
        """The hidden states [rows, hidden] of the graph's rows, of which the first are those of the step; the
        next replay of any graph overwrites them. None for a step that it is not made for."""
        if not self._load(batch):
            return None
        self.again()
        return self._hidden

    def _load(self, batch: PackedBatch) -> bool:
        contents = self._static.contents(batch.layout)
        if contents is None:
            return False
        given: dict[str, NDArray[np.generic]] = {
            name: ids.numpy() for name, ids in self._runner.inputs_of(batch).items()
        }
        self._inputs.load(given | dict(contents))
        return True
