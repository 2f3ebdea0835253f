"""Whole servers under load, with random weights of jina-colbert-v2's shape."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxsimd.bench.datasets import random_requests
from maxsimd.bench.load import drive
from maxsimd.bench.peers.systems import Server
from maxsimd.bench.tokenizer import unigram_tokenizer

Figures = dict[str, Any]


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


# Workloads for which others publish figures. Every query is encoded anew; our engine has no cache for
# queries.
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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=unigram_tokenizer(shape.vocabulary),
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=8192,
    )
    options = {} if shape.family == "modernbert" else {"type_vocab_size": 1}
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=8194,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
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
                await drive(running.send, warm, 4, None, 0)
                requests = random_requests(
                    workload.requests,
                    workload.documents,
                    workload.input_len,
                    workload.range_ratio,
                    False,
                    number,
                )
                duration, outcomes = await drive(running.send, requests, workload.concurrency, None, 0)
                failed = [outcome.error for outcome in outcomes if outcome.error]
                if failed:
                    raise RuntimeError(f"a request failed: {failed[0]}")
                milliseconds = [outcome.seconds * 1e3 for outcome in outcomes]
                p50, p99 = np.percentile(milliseconds, (50, 99))
                figures[workload.name] = {
                    "requests_per_s": round(len(outcomes) / duration, 3),
                    "documents_per_s": round(sum(outcome.documents for outcome in outcomes) / duration, 1),
                    "tokens_per_s": round(sum(outcome.tokens for outcome in outcomes) / duration),
                    "latency_median_ms": round(float(p50), 1),
                    "latency_p99_ms": round(float(p99), 1),
                    "p99_of_mean": round(float(p99 / np.mean(milliseconds)), 3),
                }
    return figures
