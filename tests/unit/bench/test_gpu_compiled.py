"""Resources that compiled kernels take of a GPU, and the bounds that follow: by arithmetic, without a GPU."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.bench.gpu import compiled as table
from maxsimd.bench.gpu.ahead_of_time import H100, H200, MachineCode, compiled, resident_programs
from maxsimd.bench.gpu.compiled import COLBERT, COLPALI, LIMITS, MaxSimLaunch, maxsim_launches
from maxsimd.engine.ops.triton.maxsim_tiles import QUERY_CLASSES
from tests.exhaustive import exhaustive

pytest.importorskip("triton")

# Kernels that `make test` compiles: those of other tests for one generation, and one or two for the others.
FEW = (
    MaxSimLaunch(90, 32), MaxSimLaunch(90, 32, documents="i8"), MaxSimLaunch(80, 32), MaxSimLaunch(100, 32),
    MaxSimLaunch(90, 32, 128, "fp32", "fp32"), MaxSimLaunch(90, 1024), MaxSimLaunch(90, 1024, documents="i8"),
)  # fmt: skip


def launches() -> list[MaxSimLaunch]:
    """All that the table has, and float16, which has the tiles of bfloat16, where it differs: with int8."""
    found = [launch for capability in (80, 90, 100) for launch in maxsim_launches(capability)]
    found += [MaxSimLaunch(90, 32, 128, documents, "fp16") for documents in ("fp16", "i8")]
    found += [MaxSimLaunch(90, 32, dim, "i8", "fp32") for dim in (42, 128)]
    for dtype in ("bf16", "i8"):
        found += [MaxSimLaunch(90, query, documents=dtype, split=True) for query in QUERY_CLASSES]
    # Cards with less shared memory than those of data centres.
    return [*found, MaxSimLaunch(86, 1024), MaxSimLaunch(86, 32, 1024), MaxSimLaunch(86, 1024, 512)]


@pytest.mark.parametrize(
    "launch",
    [*filter(FEW.__contains__, launches()), *exhaustive(*(one for one in launches() if one not in FEW))],
    ids=lambda one: f"sm_{one.capability}: {one.name}, {one.tiles.stages} stages, split {one.split}",
)
def test_maxsim_fits_into_registers_and_shared_memory(launch: MaxSimLaunch) -> None:
    code = compiled(launch.source, launch.capability)
    for loop in code.loops:
        assert loop.count(lambda instruction: "LDL" in instruction or "STL" in instruction) == 0
    # Before its loop, a kernel compiled by Triton 3.6 may put a few aside.
    assert code.spills <= (0 if importlib.metadata.version("triton") >= "3.9" else 5)
    assert code.shared <= LIMITS[launch.capability].shared_memory
    assert compiled(launch.sum_source, launch.capability).spills == 0
    if launch.capability == 90 and launch.queries != "fp32":
        assert code.main_loop.tensor


def on_hopper(longest_query: int, documents: str = "bf16") -> tuple[MaxSimLaunch, MachineCode]:
    launch = MaxSimLaunch(90, longest_query, documents=documents)
    return launch, compiled(launch.source, 90)


@pytest.mark.parametrize(
    ("longest_query", "documents", "programs", "instructions"),
    [
        (32, "bf16", 5, 125), (1024, "bf16", 2, 240), (32, "i8", 6, 260), (1024, "i8", 2, 340),
        *exhaustive((64, "bf16", 4, 140), (128, "bf16", 2, 240), (64, "i8", 4, 290)),
    ],
)  # fmt: skip
def test_turns_are_short_and_int8_is_multiplied_at_once(
    longest_query: int, documents: str, programs: int, instructions: int
) -> None:
    _, code = on_hopper(longest_query, documents)
    assert resident_programs(code, H100) >= programs
    loop = code.main_loop
    assert len(loop) <= instructions
    if documents == "i8" and longest_query != 64:
        assert (len(loop.tensor), loop.count(lambda each: "WARPGROUP.ARRIVE" in each)) == (8, 1)
        assert loop.count(lambda each: re.search(r"\bSTS", each) is not None) == 0
        assert loop.count(lambda each: "LDGSTS" in each) > 0, "tiles come before they are needed"


@pytest.mark.parametrize("documents", ["bf16", "i8"])
def test_loads_are_wide_though_addresses_are_not_specialised(documents: str) -> None:
    launch, code = on_hopper(32, documents)
    for each in (launch.source, launch.sum_source):
        assert each.types.keys() & each.kernel.arg_names <= set(each.kernel.do_not_specialize_on_alignment)
    assert code.wide_loads > 0
    assert {".128" in each for each in code.main_loop.instructions if "LDGSTS" in each} == {True}


def test_passages_are_bound_by_memory_and_pages_by_products() -> None:
    assert table.forecast(*on_hopper(1024), COLPALI, H100).tflops >= 540
    assert table.forecast(*on_hopper(1024, "i8"), COLPALI, H100).tflops >= 440
    for gpu in (H100, H200):
        found = table.forecast(*on_hopper(32), COLBERT, gpu)
        assert (found.held_up_by, found.floor_us) == ("memory", pytest.approx(460.8e6 / gpu.bandwidth * 1e6))
        assert found.over_floor <= 0.10
    times = [table.forecast(*on_hopper(32, documents), COLBERT, H100).us for documents in ("bf16", "i8")]
    assert times[0] / times[1] >= 1.4, "int8 documents take less time"


def test_the_table_is_printed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = lambda capability: [*table.maxsim_variants(capability)][:1]  # noqa: E731
    monkeypatch.setattr(table, "KERNELS", {"MaxSim": first})
    path = tmp_path / "compiled.json"
    result = CliRunner().invoke(main, ["bench", "kernels", "--compiled", "--json", str(path)])
    assert (result.exit_code, "held up by memory" in result.output) == (0, True), result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["capability"] for row in rows] == [80, 90, 100]
    assert rows[1]["programs"] == {"H100": 5, "H200": 5}
    refused = CliRunner().invoke(main, ["bench", "kernels", "--json", "x"])
    assert (refused.exit_code, "--json goes with --compiled" in refused.output) == (2, True), refused.output
