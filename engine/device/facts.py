"""The description of a served model as plain data."""

import functools
from dataclasses import dataclass

import torch

from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.load import DeviceModel
from maxsimd.engine.ops.cpu.library import why_unavailable
from maxsimd.engine.ops.triton.launch import runs_plain_torch
from maxsimd.engine.scoring.scale import ScoreScale, has_bounds, score_scale


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of scores: by default, `raw` without the activation, and `normalized`."""

    default: ScoreScale
    raw: ScoreScale
    normalized: ScoreScale


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A served model as plain data, for processes that do not run it.

    `dims` has the number of columns of each task's items, and `normalized` names the tasks with unit vectors.
    `max_tokens` is the longest sequence that can be run, `step_tokens` the budget of one step. `normalizes`
    says whether scores have bounds and can be normalized. `findings` say what was compared at load."""

    name: str
    score_type: ScoreType
    score_task: str
    dims: dict[str, int]
    normalized: tuple[str, ...]
    embed_pooling: str | None
    labels: tuple[str, ...]
    max_tokens: int
    step_tokens: int
    reads_pictures: bool
    scales: Scales
    normalizes: bool
    device: str
    kernels: str
    precision: str
    execution: str
    findings: tuple[str, ...]
    has_score: bool = True

    @property
    def is_classifier(self) -> bool:
        """Whether it only classifies: several labels give no single score, unless one is chosen."""
        return not self.has_score and "classify" in self.dims

    @property
    def how_it_runs(self) -> str:
        """One line for logs."""
        how = f"{self.precision}, {self.execution} on {self.device}"
        return f"{self.score_type.value}, {how}, {self.kernels}"


def facts_of(loaded: DeviceModel, max_tokens: int) -> ModelFacts:
    """The facts of a model that is ready on its device. Its engine runs sequences of up to `max_tokens`."""
    model = loaded.model
    scale_of = functools.partial(score_scale, model, calibrated=loaded.calibration is not None)
    return ModelFacts(
        name=model.name,
        score_type=model.score_type,
        score_task=model.score_task,
        dims={name: task.dim for name, task in model.tasks.items()},
        normalized=tuple(name for name, task in model.tasks.items() if task.normalized),
        embed_pooling=model.tasks["embed"].pooling if "embed" in model.tasks else None,
        labels=model.labels,
        has_score=model.has_score,
        max_tokens=max_tokens,
        step_tokens=loaded.step_tokens,
        reads_pictures=model.vision is not None,
        scales=Scales(scale_of(), scale_of(use_activation=False), scale_of(normalize=True)),
        normalizes=has_bounds(model),
        device=str(loaded.device),
        kernels=kernels_in_words(loaded.device, loaded.attention, loaded.maxsim_name),
        precision=f"{loaded.dtype_name} with int8 weights" if loaded.quantized else loaded.dtype_name,
        execution=loaded.execution,
        findings=tuple(map(str, loaded.findings)),
    )


def kernels_in_words(device: torch.device, attention: str | None, maxsim: str) -> str:
    """The backends of attention and MaxSim, or the reason for plain torch."""
    if runs_plain_torch(device):
        return f"plain torch: there are no kernels for {'AMD GPUs' if device.type == 'cuda' else device.type}"
    reason = why_unavailable() if device.type == "cpu" and maxsim in ("tiled", "reference") else None
    if reason is not None:
        return f"plain torch: {reason}"
    return f"attention by {attention or 'the model itself'}, MaxSim by {maxsim}"
