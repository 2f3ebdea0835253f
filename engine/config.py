"""The engine's configuration. The command line and the page of options are generated from it."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints
from warnings import warn

from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.parameters import with_sections

C = TypeVar("C")


class ScoreType(Enum):
    """The ways to score a query against a document. Listwise (jina-reranker-v3) runs a query with a block of
    documents in one pass, and scores each from the hidden state at its marker. Sparse is the dot product of
    word weights. Hybrid (bge-m3) is the weighted mean of dense, sparse and multi-vector scores of one
    pass. A language model ranks documents by prompts that show several, and gives the probability of each
    label that a request names as the next token. A token classifier labels the tokens of a text, and scores
    nothing."""

    LATE_INTERACTION = "late-interaction"
    CROSS_ENCODER = "cross-encoder"
    BI_ENCODER = "bi-encoder"
    LISTWISE = "listwise"
    SPARSE = "sparse"
    HYBRID = "hybrid"
    LANGUAGE_MODEL = "language-model"
    TOKEN_CLASSIFIER = "token-classifier"

    @property
    def encodes_apart(self) -> bool:
        """Whether queries and documents have embeddings, from which scores are made."""
        together = ScoreType.CROSS_ENCODER, ScoreType.LISTWISE, ScoreType.LANGUAGE_MODEL
        return self not in (*together, ScoreType.TOKEN_CLASSIFIER)

    @property
    def scores_together(self) -> bool:
        """Whether a document's score depends on the other documents of its request."""
        return self in (ScoreType.LISTWISE, ScoreType.LANGUAGE_MODEL)


# The numbers that options take. `compress_ratio` is as in FlagEmbedding.
_CHOICES = {"steps_in_flight": (1, 2), "compress_ratio": (1, 2, 4, 8)}
# Other numbers are at least 1, but these may be 0.
_FROM_ZERO = {"max_queued_tokens", "window_overlap", "cache_mb", "device_cache_mb", "document_store_mb"}
# Groups of options, with their titles on help pages.
GROUPS = {
    "model": "Model",
    "server": "Server",
    "limits": "Limits",
    "cache": "Cache",
    "performance": "Performance",
    "security": "Security",
    "processes": "Several models and processes",
    "advanced": "Advanced",
}
# Collections that are keywords of an EngineConfig too.
_IN_PYTHON = ("debug", "model_option")
# Model options that few models have. In Python, the others stay keywords like any option.
_OF_FEW_MODELS = {"hybrid_weights", "cutoff_layer", "compress_ratio", "compress_layers"}
# Collections of options, such as `debug={"attention": "torch"}`, by the group that each is in.
COLLECTIONS = {"model_option": "model", "limit": "limits", "debug": "advanced"}


def option(
    default: Any,
    help: str,
    *,
    group: str | None = None,
    within: str | None = None,
    by_default: str | None = None,
    metavar: str | None = None,
    is_usual: bool = False,
) -> Any:
    """A configuration field with its help, and its group or the collection that it is `within`. `by_default`
    describes a default that is computed. Plain help pages show the usual options."""
    group = group or COLLECTIONS[within or ""]
    metadata = {"help": help, "group": group, "within": within, "by_default": by_default}
    return field(default=default, metadata={**metadata, "metavar": metavar, "is_usual": is_usual})


def names_within(config: type, collection: str) -> tuple[str, ...]:
    """The options of a configuration that a collection holds."""
    return tuple(each.name for each in fields(config) if each.metadata.get("within") == collection)


def with_collections(config: type[C]) -> type[C]:
    """Lets a configuration take `debug` and `model_option`: options by name. Warns of keywords for debugging,
    or for few models, that belong in them."""
    init, names = config.__init__, {each.name for each in fields(config)}  # type: ignore[arg-type]
    within = {name: keyword for keyword in _IN_PYTHON for name in names_within(config, keyword)}
    hinted = {*names_within(config, "debug"), *_OF_FEW_MODELS}

    @wraps(init)
    def init_with_collections(self: C, **given: Any) -> None:
        is_replaced = given.keys() >= names  # `dataclasses.replace` gives all options
        if not is_replaced and not given.keys() >= {*_IN_PYTHON}:  # `of` gives both collections
            for name in hinted & given.keys():
                new = f"{within[name]}={{{name!r}: {given[name]!r}}}"
                warn(f"write {new} instead of {name}, which still works", FutureWarning, stacklevel=2)
        for keyword in _IN_PYTHON:
            for name, value in (given.pop(keyword, None) or {}).items():
                if within.get(name) != keyword:
                    known = ", ".join(names_within(config, keyword))
                    raise ValueError(f"{keyword} has no option {name!r}; it has {known}")
                if name in given and not is_replaced:
                    raise ValueError(f"{name} is there twice, alone and in {keyword}; leave out one")
                given[name] = value
        init(self, **given)

    own = inspect.signature(init)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _IN_PYTHON]
    shown = own.replace(parameters=[*own.parameters.values(), *added])
    init_with_collections.__signature__ = shown  # type: ignore[attr-defined]
    config.__init__ = init_with_collections  # type: ignore[assignment]
    meanings = {
        each.name: f"{each.metadata['help']}. Default: {each.metadata['by_default'] or repr(each.default)}."
        for each in fields(config)  # type: ignore[arg-type]
    }
    meanings |= {name: f"Options by name: {', '.join(names_within(config, name))}." for name in _IN_PYTHON}
    config.__doc__ = with_sections(config.__doc__ or "", {"Args": meanings})
    return config


@with_collections
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine: its model, limits and caches. `debug` and `model_option` hold further options by
    name."""

    model: str | None = option(
        None, "Folder or hub id of the checkpoint", group="model", by_default="the embedded all-MiniLM-L6-v2"
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub checkpoint", group="model")
    offline: bool = option(
        False, "Never contact a hub, and verify the checksums of downloaded folders", group="model"
    )
    score_type: Literal[
        "auto", "late-interaction", "cross-encoder", "bi-encoder", "sparse", "hybrid", "language-model"
    ] = option(
        "auto",
        "auto, late-interaction, cross-encoder, bi-encoder, sparse, hybrid (bge-m3) or language-model",
        group="model",
        metavar="TYPE",
        is_usual=True,
    )
    hybrid_weights: str | None = option(
        None,
        "Weights of dense, sparse and multi-vector scores in hybrid scoring, scaled to a sum of 1",
        within="model_option",
        by_default="0.4,0.2,0.4",
        metavar="WEIGHTS",
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda:N, mps, xpu or hip",
        group="performance",
        metavar="DEVICE",
        is_usual=True,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto, float32, bfloat16 or float16", group="performance", metavar="TYPE", is_usual=True
    )
    max_model_len: int | None = option(
        None, "Longest sequence, in tokens", group="model", by_default="the model's", is_usual=True
    )
    max_batch_tokens: int | None = option(
        None, "Tokens in a step", group="performance", by_default="CPU 2048, GPU 16384"
    )
    max_batch_sequences: int = option(512, "Most sequences in a step", within="limit")
    max_queued_tokens: int = option(
        8_000_000, "Refuse requests with 429 while more tokens than this wait", group="limits"
    )
    max_wait_seconds: float | None = option(
        None, "Refuse requests whose estimated wait exceeds this; inf refuses none", group="limits"
    )
    max_request_tokens: int = option(10_000_000, "Refuse requests with more tokens than this", group="limits")
    max_vectors: int = option(
        8192, "Most vectors of a query or document in late interaction; of a pair, its square", within="limit"
    )
    steps_in_flight: int = option(2, "Steps on the device at a time: 1 or 2", within="debug")
    step_timeout_seconds: float = option(
        60.0, "End the engine when a step makes no progress for this long; 0 waits forever", within="limit"
    )
    quantization: Literal["none", "int8"] = option(
        "none", "none, or int8 for the linear layers on a CPU", group="performance", metavar="TYPE"
    )
    kernels: Literal["auto", "torch"] = option(
        "auto", "auto (compiled kernels and fused layers) or torch (neither)", within="debug"
    )
    maxsim: Literal["auto", "reference", "tiled", "avx512", "triton"] = option(
        "auto", "Backend of MaxSim: auto, reference, tiled, avx512 or triton", within="debug"
    )
    attention: Literal["auto", "triton", "torch"] = option(
        "auto", "Backend of attention on a GPU: auto, triton or torch", within="debug"
    )
    cuda_graphs: Literal["auto", "off"] = option("auto", "CUDA graphs: auto or off", within="debug")
    packing: Literal["auto", "off"] = option("auto", "Steps without padding: auto or off", within="debug")
    prefix_sharing: Literal["auto", "off"] = option(
        "auto", "Causal models run the common prefix of pairs once: auto or off", within="debug"
    )
    dimensions: int | None = option(
        None,
        "Dimensions to keep of each embedding, for Matryoshka models",
        within="model_option",
        by_default="all",
    )
    doc_token_pooling: float | None = option(
        None,
        "Factor by which late interaction reduces document vectors; 2 halves them",
        within="model_option",
        by_default="none",
    )
    query_prompt: str | None = option(
        None,
        "Text before each query (E5: 'query: ')",
        within="model_option",
        by_default="the checkpoint's",
    )
    document_prompt: str | None = option(
        None,
        "Text before each document (E5: 'passage: ')",
        within="model_option",
        by_default="the checkpoint's",
    )
    instruction: str | None = option(
        None, "Instruction for models that take one; requests can override it", within="model_option"
    )
    rank_by: Literal["listwise", "pairwise"] = option(
        "listwise", "How a language model ranks: listwise, or pairwise", within="model_option"
    )
    calibration: str | None = option(
        None,
        "File of `maxsimd calibrate`, which turns normalized scores into probabilities",
        within="model_option",
        metavar="FILE",
    )
    score_template: str | None = option(
        None,
        "Jinja template, or a file with one, that makes a language model's prompt",
        within="model_option",
        by_default="the checkpoint's",
    )
    score_label: str | None = option(
        None,
        "Label whose probability is the score, for classifiers with several labels",
        within="model_option",
        by_default="yes, if there is one",
    )
    cutoff_layer: int | None = option(
        None,
        "Layer whose score is taken, for rerankers with a score after each layer",
        within="model_option",
        by_default="the last",
    )
    compress_ratio: int = option(
        1,
        "Rows of a document averaged into one where layers compress: 1 (none), 2, 4 or 8",
        within="model_option",
    )
    compress_layers: str | None = option(
        None,
        "Layers after which documents are compressed, such as 24,40",
        within="model_option",
        by_default="8 where compress_ratio is above 1",
        metavar="LAYERS",
    )
    window_overlap: int = option(
        64,
        "Tokens that neighboring windows of a long document share, at most half a window",
        within="model_option",
    )
    cache_mb: int | None = option(
        None,
        "Cache for documents and scores, in MiB; 0 for none",
        group="cache",
        by_default="1/16 of free memory",
        is_usual=True,
    )
    device_cache_mb: int | None = option(
        None,
        "GPU memory for copies of cached embeddings, in MiB; 0 for none",
        within="limit",
        by_default="cache_mb, at most 1/4 of free GPU memory",
    )
    cache_dir: str | None = option(
        None,
        "Folder that keeps embeddings over restarts; servers may share it",
        group="cache",
        metavar="FOLDER",
    )
    cache_disk_mb: int = option(
        4096, "Most MiB in the folder of the cache; the oldest entries are evicted", within="limit"
    )
    cache_precision: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto",
        "Precision of cached embeddings: auto (the model's), float32, bfloat16 or int8",
        group="cache",
        metavar="TYPE",
    )
    document_store_mb: int = option(
        0,
        "Texts kept for requests that name documents by digests, in MiB for each tenant; 0 for none",
        within="limit",
    )
    cache_by_tenant: bool = option(
        False, "Keep the cached entries of tenants apart; each API key then needs a name", group="cache"
    )
    threads: int | None = option(
        None,
        "Threads for computing on the CPU",
        group="performance",
        by_default="OMP_NUM_THREADS, or the available cores",
    )
    tokenizer_threads: int | None = option(
        None,
        "Threads for tokenization and other work that blocks",
        within="limit",
        by_default="2 on a CPU, half of the cores beside a GPU",
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with the checkpoint", group="security"
    )
    allow_pickle: bool = option(
        False, "Load weights that exist only as pickles; a pickle can run code", group="security"
    )
    if TYPE_CHECKING:  # msgspec, which decodes configurations, takes no InitVar
        debug: InitVar[Mapping[str, Any] | None] = None
        model_option: InitVar[Mapping[str, Any] | None] = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """A configuration of options by name, without a hint that some belong in a collection."""
        return cls(**{**dict.fromkeys(_IN_PYTHON), **options})

    def __post_init__(self, *_: object) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            choices = get_args(kind) if get_origin(kind) is Literal else _CHOICES.get(name)
            if choices is not None and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
            least = 0 if name in _FROM_ZERO else 1
            if kind in (int, int | None) and value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.compress_layers is not None:
            compress_layers_of(self.compress_layers)
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
