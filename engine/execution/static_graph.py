"""One CUDA graph: static memory for a step's inputs and metadata, and what it computes from them."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.execution.attention.base import CaptureSize, StaticMetadata
from maxsimd.engine.execution.graph_recorder import Recorder
from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.static_inputs import Field, StaticInputs


class StaticGraph:
    """The graph for one size of steps. Its replays write to `hidden` [rows, hidden], which it shares with
    other graphs."""

    def __init__(
        self,
        runner: PackedRunner,
        static: StaticMetadata,
        size: CaptureSize,
        inputs: Mapping[str, torch.Tensor],
        layout: Layout,
        hidden: torch.Tensor,
        recorder: Recorder,
    ) -> None:
        """Captures it with a step's inputs and layout."""
        self._static = static
        self._names = tuple(inputs)
        self._hidden = hidden[: size.rows]
        fields = {name: Field((size.rows,), torch.int64) for name in inputs}
        fields |= {name: Field(shape, torch.int32) for name, shape in static.shapes.items()}
        self._inputs = StaticInputs(fields, hidden.device)
        tensors = self._inputs.tensors
        metadata = static.over(tensors)
        if not self._load(inputs, layout):
            raise ValueError("the graph does not hold the step that it is captured with")

        def run() -> None:
            self._hidden.copy_(runner.run({name: tensors[name] for name in inputs}, metadata))

        self.again = recorder.capture(run)

    def replay(self, inputs: Mapping[str, torch.Tensor], layout: Layout) -> torch.Tensor | None:
        """The hidden states [rows, hidden] of the graph's rows, of which the first are those of the inputs on
        the CPU; the next replay of any graph overwrites them. None for a layout that it is not made for."""
        if not self._load(inputs, layout):
            return None
        self.again()
        return self._hidden

    def _load(self, inputs: Mapping[str, torch.Tensor], layout: Layout) -> bool:
        contents = self._static.contents(layout)
        if contents is None:
            return False
        given: dict[str, NDArray[np.generic]] = {name: inputs[name].numpy() for name in self._names}
        self._inputs.load(given | dict(contents))
        return True
