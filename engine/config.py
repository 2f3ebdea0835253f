"""The engine's configuration. The command line and the page of options are generated from it."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from maxsimd.engine.errors import ModelLoadError


class ScoreType(Enum):
    """The ways to score a query against a document. Listwise (jina-reranker-v3) is one pass over the query
    and many documents, each scored from the hidden state at its marker. Sparse is the dot product of word
    weights. Hybrid (bge-m3) is the weighted mean of dense, sparse and multi-vector scores of one pass."""

    LATE_INTERACTION = "late-interaction"
    CROSS_ENCODER = "cross-encoder"
    BI_ENCODER = "bi-encoder"
    LISTWISE = "listwise"
    SPARSE = "sparse"
    HYBRID = "hybrid"


# How many rows of a document may become one, as in FlagEmbedding.
COMPRESS_RATIOS = (1, 2, 4, 8)


def option(default: Any, help: str) -> Any:
    """A configuration field with its help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine loads its model and runs it."""

    model: str | None = option(
        None, "Folder or hub id of the checkpoint. Without one: the embedded all-MiniLM-L6-v2."
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub checkpoint.")
    offline: bool = option(
        False,
        "Ask no hub for anything, and before a folder is loaded that `maxsimd download` has made, compare "
        "its files with their digests.",
    )
    score_type: Literal["auto", "late-interaction", "cross-encoder", "bi-encoder", "sparse", "hybrid"] = (
        option(
            "auto",
            "How to score; auto takes what the checkpoint says of itself. hybrid is for bge-m3 and its kin.",
        )
    )
    hybrid_weights: str | None = option(
        None,
        "Weights of dense, sparse and multi-vector scores in hybrid ones; by default 0.4,0.2,0.4. Their sum "
        "is made 1.",
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda or cuda:N, or another type of device that torch has, such as mps, xpu, or hip for "
        "AMD's GPUs; auto is CUDA where there is one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Precision of the model; auto is bfloat16 where the hardware multiplies it natively, else float32.",
    )
    max_model_len: int | None = option(
        None, "Longest sequence in tokens; at most the checkpoint's own maximum."
    )
    max_batch_tokens: int | None = option(
        None, "Token budget of one step; by default 2,048 on a CPU and 16,384 on a GPU."
    )
    max_batch_sequences: int = option(512, "Most sequences in one step.")
    max_queued_tokens: int = option(
        8_000_000,
        "Requests are refused while more tokens than this wait, or wait themselves if max_wait_seconds is "
        "None, as in Python by default; a quarter of it is kept for small ones, and a lone request comes in.",
    )
    max_wait_seconds: float | None = option(
        None,
        "Requests are refused that would wait longer than this, by estimate, or never with inf; but any may "
        "wait for two steps and for as long as it takes itself, or, where that is more than five seconds or "
        "its priority is batch, for eight times as long. In Python the default is None: calls wait.",
    )
    max_request_tokens: int = option(10_000_000, "Most tokens of one request, whatever waits.")
    max_vectors: int = option(
        8192, "Most vectors of one query or document, for late interaction; at most the square for a pair."
    )
    steps_in_flight: int = option(
        2, "Steps on the device at a time, 1 or 2; chosen when the one before is in its last stage."
    )
    step_timeout_seconds: float = option(
        60.0,
        "The device counts as stuck, and the engine ends, when a step makes no progress for this long and 20 "
        "times as long as expected, or, before any step is done, for ten times this; 0 for never.",
    )
    quantization: Literal["none", "int8"] = option(
        "none", "int8 rounds the weights of linear layers, and what they multiply, to int8; on a CPU only."
    )
    kernels: Literal["auto", "torch"] = option(
        "auto",
        "auto runs our compiled kernels where the CPU has AVX-512, and fused layers on a GPU; torch does "
        "without both.",
    )
    maxsim: Literal["auto", "reference", "tiled", "avx512", "triton"] = option(
        "auto",
        "MaxSim: triton on a GPU; avx512, else tiled (plain torch) on a CPU; reference is slow and plain.",
    )
    attention: Literal["auto", "varlen", "flash", "triton", "torch"] = option(
        "auto",
        "Attention: varlen (torch's), flash (flash-attn) or triton (ours) on a GPU; torch is plain products.",
    )
    cuda_graphs: Literal["auto", "off"] = option(
        "auto", "auto replays steps as CUDA graphs on a GPU, where that is faster and gives the same."
    )
    packing: Literal["auto", "off"] = option(
        "auto", "auto runs steps without padding where that is proven exact at load; off pads always."
    )
    prefix_sharing: Literal["auto", "off"] = option(
        "auto", "auto runs what all pairs of a query begin with once (causal models); off runs it every time."
    )
    dimensions: int | None = option(
        None, "Number of columns of every embedding to use, the first ones, for matryoshka models."
    )
    doc_token_pooling: float | None = option(
        None,
        "Factor by which documents' token embeddings become fewer (late interaction); 2 halves them.",
    )
    query_prompt: str | None = option(
        None, "Text put before every query, instead of what the checkpoint says (E5: 'query: ')."
    )
    document_prompt: str | None = option(
        None, "Text put before every document, instead of what the checkpoint says (E5: 'passage: ')."
    )
    instruction: str | None = option(
        None, "Instruction for models that take one, unless the request brings its own."
    )
    calibration: str | None = option(
        None,
        "File of `maxsimd calibrate`: normalized scores are then probabilities that a document is relevant.",
    )
    score_template: str | None = option(
        None,
        "Jinja template, or a file with one, that asks a language model about query, document, instruction.",
    )
    score_label: str | None = option(
        None,
        "Label whose probability is the score, for classifiers with several labels; by default yes, if any.",
    )
    cutoff_layer: int | None = option(
        None,
        "Layer to stop behind, for rerankers with a score behind each (BGE's MiniCPM and Gemma2); by default "
        "the last.",
    )
    compress_ratio: int = option(
        1,
        "How many rows of a document become one (their mean) where layers compress: 1 (none), 2, 4 or 8; for "
        "bge-reranker-v2.5-gemma2-lightweight.",
    )
    compress_layers: str | None = option(
        None,
        "Layers behind which documents are compressed, such as 24,40; by default 8, if compress_ratio is not "
        "1.",
    )
    window_overlap: int = option(
        64, "Tokens that neighbouring windows of a long document share; at most half of each are."
    )
    cache_mb: int | None = option(
        None,
        "Memory for embeddings of documents, or for scores of pairs, in MiB, so that none is run twice; 0 "
        "for none; by default a sixteenth of what is free at the start, from 64 to 4,096.",
    )
    device_cache_mb: int | None = option(
        None,
        "Memory of the GPU for a second copy of cached embeddings, in MiB, so that they need not be copied "
        "to it again; 0 for none; by default as much as the cache may take, and at most a quarter of what "
        "the model and a step leave free.",
    )
    cache_dir: str | None = option(
        None,
        "Folder to cache embeddings of documents in as well; servers may share it.",
    )
    cache_disk_mb: int = option(4096, "Most MiB in that folder; the oldest go first.")
    cache_precision: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto", "Precision that embeddings are cached in and documents scored with; auto is the model's."
    )
    cache_by_tenant: bool = option(
        False, "Share no cached entries between tenants. Each API key then needs a name."
    )
    threads: int | None = option(
        None,
        "Threads for computing on the CPU; by default OMP_NUM_THREADS, else as many as there are cores, by "
        "affinity and quota (control groups).",
    )
    tokenizer_threads: int | None = option(
        None,
        "Threads for tokenization and other work that blocks; by default 2 on a CPU, and beside a GPU half "
        "of the cores, or of `threads`, at least 2.",
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the checkpoint.")
    allow_pickle: bool = option(
        False, "Load weights that are there only as pickles, which can run code as they are read."
    )

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(str, get_args(kind)))
                raise ValueError(f"{name} must be one of {choices}, not {getattr(self, name)!r}")
        for name in (
            "max_model_len",
            "max_batch_tokens",
            "max_batch_sequences",
            "threads",
            "tokenizer_threads",
            "dimensions",
            "cache_disk_mb",
            "max_request_tokens",
            "max_vectors",
            "cutoff_layer",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.steps_in_flight not in (1, 2):
            raise ValueError(f"steps_in_flight must be 1 or 2, not {self.steps_in_flight}")
        if self.compress_ratio not in COMPRESS_RATIOS:
            ratios = ", ".join(map(str, COMPRESS_RATIOS))
            raise ValueError(f"compress_ratio must be one of {ratios}, not {self.compress_ratio}")
        if self.compress_layers is not None:
            compress_layers_of(self.compress_layers)
        for name in ("max_queued_tokens", "window_overlap", "cache_mb", "device_cache_mb"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        if self.max_wait_seconds is not None and not self.max_wait_seconds >= 0:
            raise ValueError(f"max_wait_seconds must be 0 or more, inf or None, not {self.max_wait_seconds}")
        if not 0 <= self.step_timeout_seconds < math.inf:
            raise ValueError(f"step_timeout_seconds must be 0 or more, not {self.step_timeout_seconds}")
        if self.hybrid_weights is not None:
            hybrid_weights_of(self.hybrid_weights)
        if self.doc_token_pooling is not None and self.doc_token_pooling < 1:
            raise ValueError(f"doc_token_pooling must be at least 1, not {self.doc_token_pooling}")


def compress_layers_of(given: str) -> tuple[int, ...]:
    """The layers to compress behind, as they are written: numbers with commas; each once, ascending. Raises
    ValueError for anything else."""
    try:
        layers = sorted({int(layer) for layer in given.split(",")})
    except ValueError:
        layers = [0]
    if layers[0] < 1:
        raise ValueError(
            f"compress_layers must be numbers from 1 on with commas between, such as 24,40; not {given!r}"
        )
    return tuple(layers)


def hybrid_weights_of(given: str) -> tuple[float, float, float]:
    """The weights of dense, sparse and multi-vector scores, as they are written: three numbers with commas.
    Raises ValueError for anything else, and where none is above 0."""
    try:
        dense, sparse, tokens = map(float, given.split(","))
    except ValueError:
        dense = sparse = tokens = math.nan
    if not all(0 <= weight < math.inf for weight in (dense, sparse, tokens)) or dense + sparse + tokens == 0:
        raise ValueError(
            "hybrid_weights must be three numbers of 0 or more, not all 0, such as 0.4,0.2,0.4; not "
            f"{given!r}"
        )
    return dense, sparse, tokens


# The default model.
EMBEDDED_MODEL = "all-MiniLM-L6-v2"


def shown_name(model: str | None) -> str:
    """The name of a model in messages."""
    return EMBEDDED_MODEL if model is None else model.rstrip("/")


def refuse_missing_folder(model: str | None) -> None:
    """Raises ModelLoadError for a path without a folder. Other names may be hub ids."""
    if model is None or not model.startswith(("/", "./", "../", "~")):
        return
    try:
        is_there = Path(model).exists()
    except OSError as error:
        raise ModelLoadError(f"{model!r} cannot be read: {error.strerror}; let this user read it") from error
    if not is_there:
        raise ModelLoadError(f"there is no folder {model!r}")
