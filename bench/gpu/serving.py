"""`maxsimd bench gpu`: servers under load with random weights of jina-colbert-v2's shape, and a trace of how
busy the device is."""

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxsimd.bench.checkpoints import unigram_tokenizer
from maxsimd.bench.datasets import Request, random_requests
from maxsimd.bench.load import Server, drive, drive_or_raise
from maxsimd.bench.report import Figures, Report
from maxsimd.engine import CUT_LONG, Engine, EngineConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an encoder with a projection; `family` is its type in transformers."""

    family: str = "jina_embeddings_v3"
    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    intermediate: int = 4096
    vocabulary: int = 250_002
    dim: int = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` requests of `documents` documents, `concurrency` at a time; a pair has `input_len` tokens,
    give or take a share."""

    name: str
    requests: int
    documents: int
    input_len: int
    range_ratio: float
    concurrency: int

    def make(self, seed: int) -> list[Request]:
        ratio = self.range_ratio
        return random_requests(self.requests, self.documents, self.input_len, ratio, False, seed)


# Workloads for which others publish figures. The engine has no cache for queries.
WORKLOADS = (
    Workload("2,000 requests of one document, 64 at a time, 2,048 tokens", 2000, 1, 2048, 0.5, 64),
    Workload("1,000 documents of 256 tokens a request, 64 at a time", 128, 1000, 512, 0.0, 64),
    Workload("10,000 documents of 128 tokens, one request at a time", 8, 10_000, 256, 0.0, 1),
)


def save_colbert(folder: Path, shape: Shape) -> str:
    """Saves a multi-vector model of a shape as sentence-transformers does, with random weights in bfloat16
    and a Unigram tokenizer."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    special = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    special |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=unigram_tokenizer(shape.vocabulary), model_max_length=8192, **special
    )
    sizes = {"vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers}
    sizes |= {"num_attention_heads": shape.heads, "intermediate_size": shape.intermediate}
    sizes |= {"max_position_embeddings": 8194, "bos_token_id": tokenizer.bos_token_id}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes |= {} if shape.family == "modernbert" else {"type_vocab_size": 1}
    config = AutoConfig.for_model(shape.family, **sizes)
    backbone = folder / "backbone"
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(backbone)
    del model
    tokenizer.save_pretrained(backbone)
    identity = torch.nn.Identity()
    projection = Dense(shape.hidden, shape.dim, False, identity, module_input_name="token_embeddings")
    modules = [Transformer(str(backbone)), projection, Normalize(module_input_name="token_embeddings")]
    MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(folder / "saved"))
    return str(folder / "saved")


async def measure_serving(
    checkpoint: str, device: str, workloads: tuple[Workload, ...] = WORKLOADS, options: tuple[str, ...] = ()
) -> dict[str, Figures]:
    """The figures of each workload on a server, with further `options`, that encodes every document."""
    # A checkout that is not installed has no command by that name.
    command = (sys.executable, "-m", "maxsimd", "serve", "--cache-mb", "0")
    server = Server("maxsimd", (*command, "--device", device, "--max-body-mb", "512", *options))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        async with server.run(checkpoint, Path(folder, "log")) as running:
            for number, workload in enumerate(workloads):
                warm = random_requests(4, min(8, workload.documents), workload.input_len, 0.5, False, seed=99)
                await drive(running.send, warm, 4)
                requests = workload.make(seed=number)
                sent = await drive_or_raise(running.send, requests, workload.concurrency)
                found = Report({}, *sent).figures()
                ratio = round(found["latency_p99_ms"] / found["latency_mean_ms"], 3)
                figures[workload.name] = found | {"p99_of_mean": ratio}
    return figures


async def measure_busy_share(config: EngineConfig, workload: Workload) -> Figures:
    """Runs the workload through an engine in this process, the second half of it under the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    requests = workload.make(seed=7)
    half = len(requests) // 2
    async with Engine(config) as engine:

        async def send(request: Request) -> tuple[dict[int, float], int]:
            await engine.score(request.query, request.documents, truncation=CUT_LONG, cache="bypass")
            return {}, 0

        await drive_or_raise(send, requests[:half], workload.concurrency)
        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            await drive_or_raise(send, requests[half:], workload.concurrency)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type) == "DeviceType.CUDA"
    ]
    return busy_share(spans)


def busy_share(spans: Iterable[tuple[float, float]]) -> Figures:
    """The share of time in which a kernel ran and the gaps between kernels, from (start, end) in
    microseconds, without the first and last tenth of the time, when the load is not full."""
    table = np.array(sorted(spans), dtype=np.float64).reshape(-1, 2)
    if len(table) == 0:
        return {"kernels": 0}
    first, last = table[0, 0], table[:, 1].max()
    low, high = first + 0.1 * (last - first), last - 0.1 * (last - first)
    table = table[(table[:, 1] > low) & (table[:, 0] < high)].clip(low, high)
    done = np.maximum.accumulate(table[:, 1])
    gaps = np.maximum(0.0, table[1:, 0] - done[:-1])
    idle = gaps.sum() + (table[0, 0] - low) + (high - done[-1])
    return {
        "kernels": len(table),
        "busy_share": round(float(1 - idle / (high - low)), 4),
        "gap_median_us": round(float(np.median(gaps)), 2),
        "gap_p99_us": round(float(np.percentile(gaps, 99)), 2),
        "longest_gap_us": round(float(gaps.max()), 1),
    }
