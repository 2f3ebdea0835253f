"""The benchmarks of a GPU, run small and on a CPU."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.bench.gpu.kernels import measure_kernels, prepared
from maxsimd.bench.gpu.serving import Shape, Workload, measure_serving, save_colbert
from maxsimd.bench.gpu.shapes import AttentionShape, MaxSimShape
from maxsimd.bench.gpu.trace import busy_share
from maxsimd.bench.timing import Run
from tests.unit.engine.ops.interpreted import run_interpreted


def check_kernels() -> None:
    figures = measure_kernels(
        torch.device("cpu"),
        2,
        (MaxSimShape("few", 4, 5, (3, 9), 16, rounded=True),),
        (AttentionShape("few", 2, 10, 4, 2, 32, True),),
        rows=40,
    )
    maxsim = ("MaxSim: few", "MaxSim: few, in int8")
    for name in (*maxsim, "attention: few", "projection: 40 rows, 1,024 to 128"):
        assert figures[name]["maxsimd_ms"] > 0
        milliseconds = [value for key, value in figures[name].items() if key.endswith("_ms")]
        best_other = min(value for value in milliseconds if value != figures[name]["maxsimd_ms"])
        ratio = best_other / figures[name]["maxsimd_ms"]
        assert figures[name]["times_as_fast_as_the_best_other"] == pytest.approx(ratio, rel=0.05)
        assert figures[name]["share_of_what_the_device_can"] > 0
        assert not any(key.endswith("_failed") for key in figures[name])
        assert figures[f"{name}, each call alone"].keys() == {key for key in figures[name] if "_ms" in key}
    in_16_bits = min(value for key, value in figures["MaxSim: few"].items() if key.endswith("_ms"))
    in_int8 = figures["MaxSim: few, in int8"]
    assert in_int8["times_as_fast_as_the_best_in_16_bits"] == pytest.approx(
        in_16_bits / in_int8["maxsimd_ms"], rel=0.01
    )


@pytest.mark.exhaustive
def test_kernels_are_measured_beside_plain_torch() -> None:
    pytest.importorskip("triton")
    run_interpreted(check_kernels)


def test_a_contender_that_fails_or_is_wrong_is_not_timed() -> None:
    def broken(data: torch.Tensor) -> Run:
        raise RuntimeError("no such kernel")

    ready = prepared(
        {
            "right": lambda data: lambda: data * 1.001,
            "wrong": lambda data: lambda: data * 1.1,
            "empty": lambda data: lambda: data * torch.nan,
            "broken": broken,
        },
        [torch.ones(4), torch.ones(4)],
        torch.ones(3),
    )
    assert list(ready.runs) == ["right"]
    assert ready.failures == {
        "wrong": "its results differ by 0.1 of the largest",
        "empty": "its results differ by nan of the largest",
        "broken": "RuntimeError: no such kernel",
    }


@pytest.mark.exhaustive
async def test_a_server_is_measured_under_published_workloads(tmp_path: Path) -> None:
    checkpoint = save_colbert(tmp_path, Shape(layers=1, hidden=32, heads=2, vocabulary=30_600, dim=16))
    workloads = (Workload("single", 6, 1, 300, 0.5, 3), Workload("many", 2, 20, 64, 0.0, 2))
    figures = await measure_serving(checkpoint, "cpu", workloads)
    for workload in workloads:
        of_it = figures[workload.name]
        assert of_it["documents_per_s"] == pytest.approx(
            of_it["requests_per_s"] * workload.documents, rel=0.1
        )
        # Queries are counted with their documents.
        assert of_it["tokens_per_s"] > workload.input_len / 4 * of_it["documents_per_s"]


def test_the_busy_share_counts_kernels_at_the_same_time_once() -> None:
    # 0 to 100, of which the first and last tenth are left out: idle from 30 to 40 and from 70 to 80.
    figures = busy_share([(0, 20), (10, 30), (40, 70), (50, 60), (80, 100)])
    assert figures["busy_share"] == pytest.approx(60 / 80)
    assert figures["longest_gap_us"] == 10
    assert busy_share([]) == {"kernels": 0}


def test_without_a_gpu_the_commands_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for command in ("gpu", "kernels"):
        result = CliRunner().invoke(main, ["bench", command])
        assert result.exit_code == 1
        assert "there is none" in result.output
