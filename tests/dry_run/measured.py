"""What a plain step of a model costs on the GPU that is not there, and the table of all models' costs that
the tests hold: `held.txt`.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.checkpoints import two_towers, vision_language, visual
from tests.dry_run.driving import LENGTHS, OnGPU, first_layers, load, plain_step
from tests.dry_run.gpu import Counts, fake_gpu
from tests.parity.families import FAMILIES, LISTWISE

HELD = Path(__file__).with_name("held.txt")
# Whose libraries make the host wait within a step and cannot be told not to: those that run padded, and token
# pooling, which forms clusters on the host.
MAY_WAIT = {"SGPT", "native multi-vector, token pooling", "LFM2-ColBERT"}
# The same of passes over pictures: towers of Qwen-VL and of Idefics3.
TOWERS_WAIT = {
    "colqwen2", "colqwen2_5", "colqwen3", "qwen3_vl_embedding", "colmodernvbert", "colsmol",
}  # fmt: skip
# One of each way to run: by attention that is absolute, relative, biased, windowed or causal, by
# convolutions, by an encoder beside a decoder, padded, listwise, with pictures. `make test-all` drives all.
ONE_OF_EACH = {
    "ColBERT", "ModernBERT", "Qwen3-Reranker", "jina-reranker-v3", "colpali",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A small checkpoint: how it is built, and what is given on the command line beside it."""

    name: str
    build: Callable[[Path], str]
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = True


_VISUAL = (
    visual.colpali, visual.colqwen2, visual.colmodernvbert, vision_language.colqwen2_5,
    vision_language.colqwen3, vision_language.colsmol, vision_language.qwen3_vl_embedding, two_towers.clip,
    two_towers.siglip,
)  # fmt: skip
# What they make has sizes that depend on what tensors hold (which tokens an expert has, which words have a
# weight): without a device nobody knows them.
_NOT_DRY = {
    "nomic-embed-text-v2-moe",
    *(family.name for family in FAMILIES if family.kind in ("sparse", "hybrid") or "bge-m3" in family.name),
}
# Causal, with tokens that are not attended to: kernels for GPUs cannot leave those out.
_PADDED_ON_GPUS = {"LFM2-ColBERT"}
CHECKPOINTS = [
    *(
        Checkpoint(one.name, one.build, one.settings, one.packed and one.name not in _PADDED_ON_GPUS)
        for one in (*FAMILIES, LISTWISE)
        if one.name not in _NOT_DRY
    ),
    *(Checkpoint(build.__name__, build) for build in _VISUAL),
]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step of whole sequences: kernels a layer and outside of the layers, copies in both directions,
    bytes to the device a token, and how often the host waits."""

    layer: int
    outside: int
    copies: int
    bytes_a_token: int
    waits: int


def cost_of(on: OnGPU) -> Cost:
    """A layer is what there is less when the last one is taken away. Where layers differ, `outside` has the
    difference, and may be negative."""
    step = plain_step(on.model)
    on.run(step)  # what is made once is not counted
    whole = _counted(on, lambda: on.run(step))
    with first_layers(on.model.backbone, -1) as layers:
        layer = whole.launches.total() - _counted(on, lambda: on.run(step)).launches.total()
    return Cost(
        layer,
        whole.launches.total() - layer * layers,
        whole.to_device + whole.to_host,
        round(whole.bytes_to_device / sum(LENGTHS)),
        whole.waits,
    )


def _counted(on: OnGPU, run: Callable[[], object]) -> Counts:
    with on.gpu.counted() as counts:
        run()
    return counts


def measure_all(folder: Path) -> dict[str, Cost]:
    """Builds all checkpoints; takes about a minute."""
    costs = {}
    for number, checkpoint in enumerate(CHECKPOINTS):
        loaded = load(checkpoint.build(folder / str(number)), **checkpoint.settings)
        with fake_gpu() as gpu:
            gpu.may_wait = checkpoint.name in MAY_WAIT
            on = OnGPU(gpu, loaded, "varlen")
            costs[checkpoint.name] = cost_of(on)
            on.close()
    return costs


def table_of(costs: dict[str, Cost]) -> str:
    """A line a model, its name last."""
    names = [each.name for each in fields(Cost)]
    rows = ["  ".join(names)]
    for name, cost in costs.items():
        numbers = (str(number).rjust(len(x)) for number, x in zip(astuple(cost), names, strict=True))
        rows.append("  ".join([*numbers, name]))
    return "\n".join(rows) + "\n"


def held() -> dict[str, Cost]:
    _, *rows = HELD.read_text(encoding="utf-8").splitlines()
    costs = {}
    for row in rows:
        *numbers, name = row.split(maxsplit=len(fields(Cost)))
        costs[name] = Cost(*map(int, numbers))
    return costs
