"""What compiled kernels take of a GPU, and the bounds that follow: by arithmetic, since no GPU is needed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.bench.gpu import compiled as table
from maxsimd.bench.gpu.ahead_of_time import MachineCode, compiled
from maxsimd.bench.gpu.bounds import H100, H200, resident_programs
from maxsimd.bench.gpu.maxsim_compiled import (
    COLBERT,
    COLPALI,
    LIMITS,
    MaxSimLaunch,
    forecast,
    maxsim_launches,
)

pytest.importorskip("triton")


# What `make test` compiles: of one generation what other tests compile too, and of the others one or two.
FEW = (
    MaxSimLaunch(90, 32),
    MaxSimLaunch(90, 32, documents="i8"),
    MaxSimLaunch(80, 32),
    MaxSimLaunch(100, 32, documents="i8"),
    MaxSimLaunch(90, 32, 128, "fp32", "fp32"),
)


def launches() -> list[MaxSimLaunch]:
    """All that the table has, and float16, which has the tiles of bfloat16, where it differs: with int8."""
    found = [launch for capability in (80, 90, 100) for launch in maxsim_launches(capability)]
    found += [MaxSimLaunch(90, 32, 128, documents, "fp16") for documents in ("fp16", "i8")]
    found += [MaxSimLaunch(90, 32, dim, "i8", "fp32") for dim in (42, 128)]
    # Cards with less shared memory than those of data centres.
    return [*found, MaxSimLaunch(86, 1024), MaxSimLaunch(86, 32, 1024), MaxSimLaunch(86, 1024, 512)]


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(
            launch,
            id=f"sm_{launch.capability}: {launch.name}",
            marks=() if launch in FEW else pytest.mark.exhaustive,
        )
        for launch in launches()
    ],
)
def test_maxsim_fits_into_registers_and_shared_memory(launch: MaxSimLaunch) -> None:
    code = compiled(launch.source, launch.capability)
    assert code.spills == 0
    assert code.shared <= LIMITS[launch.capability].shared_memory
    if launch.capability == 90 and launch.queries != "fp32":
        assert code.main_loop.tensor


@pytest.mark.parametrize(
    "query", [32, *(pytest.param(query, marks=pytest.mark.exhaustive) for query in (64, 128, 256))]
)
def test_the_sum_over_splits_fits_into_registers(query: int) -> None:
    assert compiled(MaxSimLaunch(90, query).sum_source, 90).spills == 0


def on_hopper(longest_query: int, documents: str = "bf16") -> tuple[MaxSimLaunch, MachineCode]:
    launch = MaxSimLaunch(90, longest_query, documents=documents)
    return launch, compiled(launch.source, 90)


@pytest.mark.parametrize(
    ("longest_query", "documents", "programs", "instructions"),
    [
        (32, "bf16", 4, 125),
        (1024, "bf16", 2, 240),
        (32, "i8", 5, 260),
        (1024, "i8", 3, 355),
        pytest.param(64, "bf16", 3, 140, marks=pytest.mark.exhaustive),
        pytest.param(64, "i8", 4, 290, marks=pytest.mark.exhaustive),
    ],
)
def test_a_turn_takes_few_instructions_and_others_run_beside_it(
    longest_query: int, documents: str, programs: int, instructions: int
) -> None:
    """Of 64 document tokens, with all query tokens of the tile."""
    _, code = on_hopper(longest_query, documents)
    assert resident_programs(code, H100) >= programs
    assert len(code.main_loop) <= instructions


def test_passages_are_bound_by_memory_and_pages_by_products() -> None:
    for documents in ("bf16", "i8"):
        assert forecast(*on_hopper(1024, documents), COLPALI, H100).tflops >= 570
    for gpu in (H100, H200):
        found = forecast(*on_hopper(32), COLBERT, gpu)
        assert found.held_up_by == "memory"
        assert found.floor_us == pytest.approx(460.8e6 / gpu.bandwidth * 1e6)
        assert found.over_floor <= 0.10
    times = [forecast(*on_hopper(32, documents), COLBERT, H100).us for documents in ("bf16", "i8")]
    assert times[0] / times[1] >= 1.6, "int8 documents take less time"


def test_the_table_is_printed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def few(capability: int) -> list[table.Variant]:
        return list(table.maxsim_variants(capability))[:1]

    monkeypatch.setattr(table, "KERNELS", {"MaxSim": few})
    path = tmp_path / "compiled.json"
    result = CliRunner().invoke(main, ["bench", "kernels", "--compiled", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "held up by memory" in result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["capability"] for row in rows] == [80, 90, 100]
    assert rows[1]["programs"] == {"H100": 4, "H200": 4}
    refused = CliRunner().invoke(main, ["bench", "kernels", "--json", "x"])
    assert refused.exit_code == 2
    assert "--json goes with --compiled" in refused.output
