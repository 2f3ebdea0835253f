"""The description of a loaded model, which all later stages read, and the properties of its backbone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint.reading import Reader
from maxsimd.engine.checkpoint.reference import Reference, declares
from maxsimd.engine.checkpoint.templates import ChatRole, ScoreTemplate
from maxsimd.engine.checkpoint.visual import Vision
from maxsimd.engine.config import ScoreType
from maxsimd.pooling.dispatch import TokenPooling
from maxsimd.pooling.methods import Head
from maxsimd.scheduler.sequence import AnyTokens, TokenIds, Tokens

T = TypeVar("T", Tokens, AnyTokens)
# Tokenizers without a limit have a number of at least this size in its place.
_NO_LIMIT = 1_000_000
# "Instruct: {task}\nQuery:", as E5-instruct and Qwen3-Embedding have it (Wang et al. 2023, arXiv 2401.00368).
INSTRUCT = re.compile(r"(Instruct: ).*?(\n\s*Query: ?)$", re.DOTALL)
Similarity = Literal[
    "maxsim",
    "meanmaxsim",
    "cosine",
    "dot",
    "euclidean",
    "manhattan",
    "sparse",
    "sparse-cosine",
    "sparse-euclidean",
    "sparse-manhattan",
    "hybrid",
]
# The task whose items are sparse vectors, and that whose items are all that hybrid scores are made of.
SPARSE_EMBED, HYBRID_EMBED = "sparse_embed", "hybrid_embed"
# The task of a language model: the last hidden state of a prompt, and the normalizer of its next token.
LABEL_SCORES = "label_scores"
# The task whose items are the logits of each token's labels.
TOKEN_CLASSIFY = "token_classify"


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """ColBERT's query expansion: queries are filled up to `length` tokens with `token_id`.

    With `fixed`, a longer query is truncated to that length. Without `attended`, no token attends to the
    added ones."""

    length: int
    token_id: int
    attended: bool
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class RoleRules:
    """Rules by which a text in one role becomes token ids: a prompt, its own length, expansion. The
    `leading_ids` stand before the prompt and the `trailing_ids` behind the text, however long it is. A `chat`
    template writes texts, with the prompt in the system's place. Nothing is read behind the first `last_id`.

    Tokens that take no part in scoring: those of `skipped_ids`, the prompt's unless `pool_prompt`, the
    special tokens around a text unless `pool_specials`, and the first token unless `pool_first`."""

    prompt: str = ""
    leading_ids: TokenIds | None = None
    trailing_ids: TokenIds | None = None
    max_tokens: int | None = None
    expansion: Expansion | None = None
    skipped_ids: NDArray[np.int64] | None = None
    pool_prompt: bool = True
    pool_specials: bool = True
    pool_first: bool = True
    chat: ChatRole | None = None
    last_id: int | None = None

    @property
    def before(self) -> str:
        """The text before a text, tokenized with it. Raises InvalidRequestError for a prompt that the chat
        template cannot hold."""
        return self.prompt if self.chat is None else self.chat.before(self.prompt)

    def instructed(self, instruction: str) -> "RoleRules":
        """A copy with an instruction in the prompt, or as the prompt of a chat template that has a place for
        one."""
        if self.chat is not None:
            return replace(self, prompt=instruction)
        prompt = INSTRUCT.sub(lambda found: f"{found[1]}{instruction}{found[2]}", self.prompt)
        return replace(self, prompt=prompt)

    @property
    def takes_instruction(self) -> bool:
        if self.chat is not None:
            return self.chat.takes_prompt
        return INSTRUCT.match(self.prompt) is not None

    @property
    def num_fixed_ids(self) -> int:
        """The number of tokens before and behind every text."""
        return sum(len(ids) for ids in (self.leading_ids, self.trailing_ids) if ids is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PairRules:
    """Rules that join a cross-encoder's query and document: by the tokenizer's template for pairs, or by
    `template`. A pair that is too long is truncated by `truncation`, as the tokenizers library names it."""

    truncation: Literal["longest_first", "only_first", "only_second"] = "longest_first"
    template: ScoreTemplate | None = None


@dataclass(frozen=True, slots=True)
class ListwiseRules:
    """Rules that pack a listwise model's documents into passes: at most `block_documents` in one, and no more
    once a document of the greatest length might not fit into `context`. Longer texts are truncated."""

    query_marker: str
    document_marker: str
    context: int
    max_query_tokens: int = 512
    max_document_tokens: int = 2048
    block_documents: int = 125


@dataclass(frozen=True, slots=True)
class Compression:
    """Every `ratio` rows of a document become their mean behind each of the `layers`, which count from 1."""

    ratio: int
    layers: tuple[int, ...]

    def __str__(self) -> str:
        layers = f"layer{'s' * (len(self.layers) > 1)} {' and '.join(map(str, self.layers))}"
        return f"every {self.ratio} rows of a document become one behind {layers}"


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A pooling method and a head for the pooled rows. The `reference` proves the execution, until the proof
    is done. Items have `dim` columns; sparse vectors have weights of up to `words` words."""

    pooling: str
    head: Head
    dim: int
    normalized: bool
    reference: Reference | None = None
    words: int | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A checkpoint in memory: what its files say, and its weights.

    `backbone` maps token ids to hidden states. `tasks` are keyed embed, token_embed, sparse_embed,
    hybrid_embed, classify, token_classify, label_scores and rank. Scores are computed from the items of
    `score_task`, compared by `similarity`; a cross-encoder's logits are its scores, and a listwise model
    scores by its `listwise` rules. `activation` turns logits into the scores that the authors meant,
    `probabilities` into probabilities. With several `labels` the score is the probability of the label
    `score_label`; None where there is no score.

    `max_tokens` is the length of the longest sequence. Longer texts are truncated at their `truncation_side`.
    Positions count from `position_offset`. A token `uncounted_id` has the position before that and is not
    counted. Ids from `token_rows` on have no embedding; None where the backbone does not say. A classifier
    with an `ending_pad_id` reads the last token that is another.

    `prompts` are the checkpoint's, by name. `instruction` is the one in use, None for a model that takes
    none. With `vision` the model reads pictures. With `compression` documents have fewer rows behind some
    layers. Hybrid scores weigh dense, sparse and multi-vector ones by `hybrid_weights`.

    `stored_as` says how weights are stored that are not in `file_dtype`. The `fingerprint` tells embeddings
    from those of other models. The files `unread` would give more embeddings if they may be read. `compared`
    says how one of our own models was compared with transformers'. `unknown_keys` has a line for each file
    with unknown keys. The `reader` is what the checkpoint's own library makes of texts, None where none was
    loaded.
    """

    name: str
    score_type: ScoreType
    backbone: torch.nn.Module
    tokenizer: Any
    tasks: Mapping[str, Task]
    score_task: str
    query: RoleRules = RoleRules()
    document: RoleRules = RoleRules()
    max_tokens: int
    causal: bool
    position_offset: int
    takes_type_ids: bool
    activation: Head = field(default_factory=torch.nn.Identity)
    architecture: str
    file_dtype: torch.dtype
    labels: tuple[str, ...] = ()
    probabilities: Head = torch.sigmoid
    similarity: Similarity = "maxsim"
    text: RoleRules = RoleRules()
    prompts: Mapping[str, str] = field(default_factory=dict)
    instruction: str | None = None
    pairs: PairRules = PairRules()
    listwise: ListwiseRules | None = None
    token_pooling: TokenPooling | None = None
    vision: Vision | None = None
    stored_as: str = ""
    fingerprint: str = ""
    hybrid_weights: tuple[float, float, float] = (0.4, 0.2, 0.4)
    unread: tuple[str, ...] = ()
    compression: Compression | None = None
    compared: str = ""
    token_rows: int | None = None
    reader: Reader | None = None
    uncounted_id: int | None = None
    ending_pad_id: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    score_label: int | None = None
    unknown_keys: tuple[str, ...] = ()

    @property
    def encoders(self) -> tuple[torch.nn.Module, ...]:
        """The modules before the heads: the backbone and, for a model that reads pictures, the tower."""
        return (self.backbone, *(self.vision.modules if self.vision is not None else ()))

    @property
    def has_score(self) -> bool:
        """Whether a query and a document have one score."""
        if self.score_task == TOKEN_CLASSIFY:
            return False
        return self.score_task != "classify" or len(self.labels) == 1 or self.score_label is not None

    @property
    def encodes_apart(self) -> bool:
        """Whether queries and documents have embeddings, from which scores are made."""
        return self.score_type.encodes_apart

    @property
    def reads_pairs(self) -> bool:
        """Whether a query and a document are one sequence."""
        return self.score_task in ("classify", LABEL_SCORES)

    @property
    def items_have_ids(self) -> bool:
        """Whether items hold ids of tokens, which only float32 holds exactly."""
        return self.similarity.startswith("sparse") or self.similarity == "hybrid"

    def for_classifier(self, tokens: T) -> T:
        """The tokens of a sequence, of which the last that is pooled is the one that the classifier reads:
        the first, where all are padding. Of a causal model those behind it are left out."""
        if self.ending_pad_id is None or tokens.last_id != self.ending_pad_id:
            return tokens
        others = np.flatnonzero(tokens.ids != self.ending_pad_id)
        count = int(others[-1]) + 1 if len(others) else 1
        if self.causal:
            return tokens.first(count)
        return Tokens(tokens.ids, tokens.type_ids, pooled_positions=np.arange(count))

    def rules(self, input_type: str | None) -> RoleRules:
        if input_type == "query":
            return self.query
        return self.document if input_type == "document" else self.text

    @property
    def takes_instruction(self) -> bool:
        """Whether an instruction can be inserted: into the template for pairs, into a listwise prompt, into
        a query prompt of the form that instruction-tuned embedding models share, or into a chat template."""
        if self.pairs.template is not None:
            return self.pairs.template.takes_instruction
        return self.listwise is not None or self.query.takes_instruction


def position_offset(backbone: torch.nn.Module) -> int:
    """The position of the first token: RoBERTa's descendants count from `padding_idx + 1`, others from 0."""
    embeddings = _embeddings_beside_padding(backbone)
    return 0 if embeddings is None else int(embeddings.padding_idx) + 1


@torch.inference_mode()
def uncounted_id(backbone: torch.nn.Module) -> int | None:
    """The token that has the position before the first wherever it stands, and is not counted: the padding
    token of RoBERTa and its descendants, also where a text has it. None for models that count every token."""
    embeddings = _embeddings_beside_padding(backbone)
    if embeddings is None:
        return None
    padding, seen = int(embeddings.padding_idx), []
    others = [token for token in range(3) if token != padding]
    ids = torch.tensor([[others[0], padding, others[1]]], device=next(backbone.parameters()).device)
    hook = embeddings.position_embeddings.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        embeddings(input_ids=ids)
    except Exception:  # it takes more than ids; all such models of transformers number positions by id
        return padding
    finally:
        hook.remove()
    by_id = torch.tensor([[padding + 1, padding, padding + 2]])
    return padding if seen and torch.equal(seen[0].cpu(), by_id) else None


def _embeddings_beside_padding(backbone: torch.nn.Module) -> Any:
    """The module that makes embeddings of token ids and positions and knows the padding token, if any."""
    for module in backbone.modules():
        padding, positions = (getattr(module, name, None) for name in ("padding_idx", "position_embeddings"))
        if isinstance(padding, int) and isinstance(positions, torch.nn.Embedding):
            return module
    return None


def max_tokens(config: Any, tokenizer: Any, offset: int) -> int:
    """The longest sequence, special tokens included, that both the model and its tokenizer take."""
    positions = getattr(config, "max_position_embeddings", None)
    # Some configs have -1, or nothing, where positions are relative and unlimited.
    limits = [positions - offset] if isinstance(positions, int) else []
    limits.append(getattr(tokenizer, "model_max_length", None) or 0)
    if getattr(config, "attention_type", None) == "block_sparse":
        # BigBird attends sparsely to texts longer than this. The first text that is not longer switches it to
        # full attention for good, so that results for longer ones depend on the texts before
        # (`BigBirdModel.forward`).
        limits.append((5 + 2 * config.num_random_blocks) * config.block_size)
    return min((int(limit) for limit in limits if 0 < limit < _NO_LIMIT), default=512)


def token_rows(backbone: Any) -> int | None:
    """The number of token embeddings; None for a backbone that does not say."""
    try:
        return int(backbone.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


@torch.inference_mode()
def is_causal(backbone: Any) -> bool:
    """Whether a token's hidden state depends only on the tokens before it.

    Tried by changing the last of a few tokens and comparing the first. False for a model on which this fails,
    which cannot be packed either."""
    try:
        size = backbone.get_input_embeddings().weight.shape[0]
        device = next(backbone.parameters()).device
        ids = torch.arange(8, device=device)[None] % size
        changed = ids.clone()
        changed[0, -1] = size - 1
        options = {"use_cache": False} if declares(backbone, "use_cache") else {}
        first, second = (
            backbone(input_ids=batch, **options).last_hidden_state[0, 0] for batch in (ids, changed)
        )
    except Exception:
        return False
    return bool(torch.equal(first, second))
