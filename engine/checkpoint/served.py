"""What is served, as one table, for `maxsimd inspect`, errors and docs/models.md."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from maxsimd.engine.checkpoint.detect import ENCODER_DECODERS, JINA_M0, LISTWISE, RETRIEVAL
from maxsimd.engine.checkpoint.retrained import JINA_V5, LAYERWISE, LLAMA_RERANKER

BI, CROSS, LATE = "bi-encoder", "cross-encoder", "late-interaction"
_OF_EMBEDDINGS = (BI, LATE)


@dataclass(frozen=True, slots=True)
class Served:
    """Checkpoints of which config.json names one of the `architectures` (patterns, as of file names), how
    they can be scored, and in which form they are read."""

    architectures: tuple[str, ...]
    kinds: tuple[str, ...]
    form: str


SERVED = (
    Served(
        ("NewModel", "NewForTokenClassification"),
        (BI, "sparse", LATE),
        "Alibaba's encoders, without the code that they come with; sparse scores where a layer that weighs "
        "tokens is among their weights",
    ),
    Served(
        ("GteModel", "JinaBertModel", "JinaBertForMaskedLM", "NomicBertModel"),
        _OF_EMBEDDINGS,
        "Snowflake's, Jina's and Nomic's encoders, without the code that they come with",
    ),
    Served(
        ("LlamaBidirectionalModel", "Lfm2BidirectionalModel"),
        _OF_EMBEDDINGS,
        "language models that read in both directions, without the code that they come with",
    ),
    Served((JINA_V5,), _OF_EMBEDDINGS, "jina-embeddings-v5-text with its adapter for retrieval, or another"),
    Served((LLAMA_RERANKER, *LAYERWISE), (CROSS,), "rerankers, without the code that they come with"),
    Served(ENCODER_DECODERS, (CROSS, *_OF_EMBEDDINGS), "monoT5 and mT5 rerankers; the encoder alone"),
    Served((LISTWISE,), ("listwise",), "jina-reranker-v3"),
    Served((JINA_M0,), (CROSS,), "jina-reranker-m0, texts and pictures"),
    Served(RETRIEVAL, (LATE,), "texts, and pages as pictures"),
    Served(("HF_ColBERT",), (LATE,), "Stanford ColBERT saves"),
    Served(("*ForSequenceClassification",), (CROSS,), "with transformers alone or as CrossEncoder saves"),
    Served(
        ("*ForCausalLM",),
        (CROSS, *_OF_EMBEDDINGS),
        "language models that answer yes or no, or as a score template says; LogitScore saves",
    ),
    Served(("*ForMaskedLM",), ("sparse", *_OF_EMBEDDINGS), "SPLADE, plain or as SparseEncoder saves"),
    Served(
        ("XLMRobertaModel",),
        (BI, "sparse", LATE, "hybrid"),
        "all three embeddings of bge-m3, with its two layers beside it",
    ),
    Served(
        ("*Model", "*ForConditionalGeneration", "*"),
        _OF_EMBEDDINGS,
        "all encoders and decoders that transformers has, alone or as saves of sentence-transformers "
        "(SentenceTransformer, MultiVectorEncoder) and PyLate",
    ),
)


def row_of(architecture: str) -> Served:
    """The first row that an architecture belongs to."""
    return next(row for row in SERVED if any(fnmatchcase(architecture, each) for each in row.architectures))


def as_lines() -> list[str]:
    """The table for people, a line a row: how it can be scored, its architectures, its form."""
    columns = [(", ".join(row.kinds), _names(row), row.form) for row in SERVED]
    widths = [max(len(column[i]) for column in columns) for i in range(2)]
    return [f"{kinds:<{widths[0]}}  {names:<{widths[1]}}  {form}" for kinds, names, form in columns]


def as_markdown() -> str:
    """The same for a page."""
    head = "| scored by | architectures | form |\n| --- | --- | --- |\n"
    return head + "\n".join(f"| {', '.join(row.kinds)} | {_names(row)} | {row.form} |" for row in SERVED)


def in_a_sentence() -> str:
    """The architectures, for an error."""
    return ", ".join(_names(row) for row in SERVED)


def _names(row: Served) -> str:
    return ", ".join(name for name in row.architectures if name != "*")
