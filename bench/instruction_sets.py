"""Each precision beside sentence-transformers, on a processor and on what less of its instructions leaves.

There is one process for each cap, whose environment holds the caps of maxsimd, torch and oneDNN before torch
is imported."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from maxsimd.bench.text_models import minilm_l6, mpnet_base
from maxsimd.engine.ops.cpu.library import VARIABLE

_LAYERS = 12
# Wide models of 12 layers take about eight times as long as MiniLM-L6.
SHAPES: dict[str, Callable[[Path], str]] = {
    "minilm-l6": minilm_l6,
    "mpnet-base": lambda folder: mpnet_base(folder, _LAYERS),
}
PRECISIONS = ("float32", "bfloat16", "int8")

_SECONDS_TO_LOAD = 600


@dataclass(frozen=True, slots=True)
class Cap:
    """What a process may use: `level` is maxsimd's name for it, and `torch` and `onednn` the others'."""

    title: str
    level: str
    torch: str
    onednn: str

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: self.level, "ATEN_CPU_CAPABILITY": self.torch, "ONEDNN_MAX_CPU_ISA": self.onednn}


WHOLE = "the processor as it is"
_ENVIRONMENT = (VARIABLE, "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
# From the most to the least, each with what it takes away: of a processor that lacks that, it takes nothing.
_CAPS = (
    (Cap("AVX-512 with VNNI", "avx512_vnni", "avx512", "AVX512_CORE_VNNI"), "avx512_bf16"),
    (Cap("AVX-512", "avx512", "avx512", "AVX512_CORE"), "avx512_vnni"),
    (Cap("AVX2", "avx2", "avx2", "AVX2"), "avx512"),
    (Cap("without AVX2", "default", "default", "SSE41"), "avx2"),
)


def caps() -> list[Cap | None]:
    """Those that take something away from this processor, after None for the processor as it is."""
    has = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
    }
    return [None, *(cap for cap, needed in _CAPS if has[needed])]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured under each cap: `texts` docstrings in `rounds` rounds, or as many as begin within
    `seconds`, on `threads` threads."""

    shape: str
    texts: int
    rounds: int
    seconds: float
    threads: int


def measure_instruction_sets(plan: Plan, onnx: str | None) -> dict[str, Any]:
    """Figures by the titles of the caps. `onnx` is an interpreter whose ONNX Runtime is measured beside the
    others on the processor as it is."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = SHAPES[plan.shape](Path(folder) / "model")
        for cap in caps():
            beside = onnx if cap is None else None
            found = _in_a_process(model, cap, plan, beside)
            title = WHOLE if cap is None else cap.title
            figures[title] = {"emulated": cap is not None, **found}
            click.echo(f"{title}: {found['over_sentence_transformers']}", err=True)
    return figures


def _in_a_process(model: str, cap: Cap | None, plan: Plan, onnx: str | None) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
    environment |= {} if cap is None else cap.environment
    numbers = [str(each) for each in (plan.texts, plan.rounds, plan.seconds, plan.threads)]
    command = [sys.executable, "-m", "maxsimd.bench.one_instruction_set", model, *numbers]
    done = subprocess.run(
        [*command, *([] if onnx is None else [onnx])],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=_SECONDS_TO_LOAD + 10 * plan.seconds,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(figures: dict[str, Any]) -> str:
    """The figures in Markdown, a cap a line: how many times as fast as sentence-transformers, on the clock
    and (in brackets) in processor time, in which busy neighbours count less."""
    more = {name for found in figures.values() for name in found["over_sentence_transformers"]}
    columns = [*PRECISIONS, *sorted(more.difference(PRECISIONS))]
    lines = [["instructions", *columns, "int8 over float32"], ["---"] + ["---:"] * (len(columns) + 1)]
    for title, found in figures.items():
        shown = f"{title} (emulated)" if found["emulated"] else title
        cells = [_ratio(found, "over_sentence_transformers", name) for name in columns]
        last = _times(found.get("int8_over_float32"), found.get("int8_over_float32_in_processor_time"))
        lines.append([shown, *cells, last])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(found: dict[str, Any], figure: str, name: str) -> str:
    """A precision's ratios, with what multiplies its weights."""
    times = _times(found[figure].get(name), found[f"{figure}_in_processor_time"].get(name))
    path = found["paths"].get(name)
    return times if path is None else f"{times}, {path}"


def _times(on_the_clock: float | None, in_processor_time: float | None) -> str:
    if on_the_clock is None or in_processor_time is None:
        return "-"
    return f"{on_the_clock:.2f} ({in_processor_time:.2f})"
