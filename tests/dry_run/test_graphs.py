"""Small steps are captured and replayed: nothing within a graph is left to the host, and a replay allocates
and copies no more than is held.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maxsimd.engine.execution.attention.base import CapturableBackend
from tests.checkpoints import bi_encoders, cross_encoders, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.dry_run.entering import fake_gpu
from tests.dry_run.gpu import FakeGPU
from tests.dry_run.models import BACKENDS, OnGPU, first_layers, load
from tests.dry_run.steps import Ids, step_of

# Of a replay by itself: the copy of its result is all that is made on the device, and all that it reads comes
# from the host in one copy.
ALLOCATIONS, COPIES = 1, 1

BUILDS = (
    cross_encoders.bert, late_interaction.stanford, late_interaction.pylate_modernbert, cross_encoders.qwen3,
    bi_encoders.embeddinggemma,
)  # fmt: skip
CAPTURABLE = [name for name, backend in BACKENDS.items() if isinstance(backend(), CapturableBackend)]
_DECODER = (cross_encoders.qwen3, CAPTURABLE[0])


@pytest.fixture
def gpu() -> Iterator[FakeGPU]:
    with fake_gpu() as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        # Each backend with an encoder, and a decoder.
        pytest.param(
            build,
            backend,
            id=f"{build.__name__}-{backend}",
            marks=() if build is BUILDS[0] or (build, backend) == _DECODER else pytest.mark.exhaustive,
        )
        for build in BUILDS
        for backend in CAPTURABLE
    ],
)
def test_small_steps_are_replayed(
    build: Callable[[Path], str], backend: str, gpu: FakeGPU, checkpoints: SharedCheckpoints
) -> None:
    on = OnGPU(gpu, load(checkpoints(build)), backend)
    with first_layers(on.model.backbone, 2):
        runner = on.graphed()
    ids = Ids(on.model)
    for lengths in ([9, 30, 1], [20], [60, 4], [200, 100]):
        step = step_of(*(ids.text(length) for length in lengths))
        with gpu.counted() as counts:
            runner.forward(step)
        assert counts.launches["graph"] == 1
        assert set(counts.launches) <= {"graph", "copy_", "clone"}
        assert (counts.allocations, counts.to_device) == (ALLOCATIONS, COPIES)
        on.run(step, runner=runner)
    on.close()


def test_long_steps_are_not(gpu: FakeGPU, checkpoints: SharedCheckpoints) -> None:
    on = OnGPU(gpu, load(checkpoints(cross_encoders.bert)), CAPTURABLE[0])
    runner = on.graphed()
    with gpu.counted() as counts:
        runner.forward(step_of(*(Ids(on.model).text(length) for length in (300, 300))))
    assert "graph" not in counts.launches
    on.close()
