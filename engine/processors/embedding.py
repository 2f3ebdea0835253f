"""Embedding: texts and pictures to one vector, one per token, weights of words, or an encoding (MUVERA).

Late chunking reads a document as one sequence with a vector for each chunk. A token belongs to the chunk
that holds its first visible character. Pooled tokens before the text go with its first token, those behind
it with its last: a document of one chunk has the vector of the whole text.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.media import Content
from maxsimd.engine.processors.documents import CacheLookup
from maxsimd.engine.processors.pages import page_builder
from maxsimd.engine.processors.processor import Plan, Processor, ProcessorContext, RequestIds
from maxsimd.engine.processors.text.builder import BuiltText, InputName, TextBuilder
from maxsimd.engine.processors.text.tokenization import Spans, TextTokenizer
from maxsimd.engine.requests import (
    REFUSE_LONG,
    Chunks,
    EmbedRequest,
    EmbedResult,
    InputType,
    SparseEmbedResult,
    SparseVector,
    TokenEmbedResult,
    Values,
)
from maxsimd.engine.workers import called_on_each, yield_to_smaller
from maxsimd.pooling.methods import PASSAGES
from maxsimd.pooling.muvera import Muvera
from maxsimd.pooling.ragged import Ragged, decoded
from maxsimd.scheduler import Role, TokenSequence

# Overlapping chunks have at most this many times the tokens of their document.
_MOST_TIMES = 8

_REASONS = {
    "cls": "this model's vector of a text is that of its first token, which only the first chunk has",
    "last": "this model's vector of a text is that of its last token, which only the last chunk has",
    "weighted-mean": "this model weighs tokens by where they stand, which differs from chunk to chunk",
}
# An estimate: making this many numbers of a vector, or drawing this many random ones, takes as long as
# running a token of a small model (MiniLM-L6).
_NUMBERS_PER_TOKEN, _DRAWN_PER_TOKEN = {"document": 1_000, "query": 16_000}, 1_000


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EmbeddingPlan(Plan):
    """One value for each text to run. `found` are cached token vectors, by the text's index."""

    model: LoadedModel
    task: str
    found: Mapping[int, CachedEmbedding] = field(default_factory=dict)

    def input_of(self, value: int) -> str:
        run = [i for i in range(self.num_values + len(self.found)) if i not in self.found]
        return f"input[{run[value]}]"

    @property
    def _is_normalized(self) -> bool:
        return self.model.tasks[self.task].normalized

    def vectors(self, values: Values, dimensions: int | None) -> EmbedResult:
        """Makes one vector per text or chunk."""
        rows = np.concatenate([np.asarray(value) for value in values.values])
        vectors = shorten(rows, dimensions, self._is_normalized)
        return EmbedResult(vectors, self.usage, self.truncated, values.timings)

    def token_vectors(
        self, values: Values, dimensions: int | None, tokenizer: TextTokenizer | None
    ) -> TokenEmbedResult:
        """Makes one matrix a text, with a row a token, and names the tokens with a `tokenizer`."""
        matrices = [shorten(np.asarray(value), dimensions, self._is_normalized) for value in values.values]
        tokens = None
        if tokenizer is not None:
            tokens = [tokenizer.strings(sequence.tokens.pooled_ids.tolist()) for sequence in self.sequences]
            if [*map(len, tokens)] != [*map(len, matrices)]:  # vectors are merged
                tokens = None
        return TokenEmbedResult(matrices, self.usage, self.truncated, values.timings, tokens)

    def sparse_vectors(self, values: Values) -> SparseEmbedResult:
        """Makes one sparse vector a text, of entries [n, 2], each a token's id and weight."""
        vectors = []
        for entries in map(np.asarray, values.values):
            entries = entries[entries[:, 1] != 0]
            entries = entries[np.argsort(entries[:, 0], kind="stable")]
            vectors.append(SparseVector(entries[:, 0].astype(np.int64), entries[:, 1].copy()))
        return SparseEmbedResult(vectors, self.usage, self.truncated, values.timings)

    def encoded(
        self, values: Values, muvera: Muvera, are_queries: bool, cache: EmbeddingCache | None
    ) -> EmbedResult:
        """Makes one vector of each text's token vectors, which documents have in the precision of the
        cache. On a thread of the pool, smaller work goes first."""
        run = iter(values.values)
        matrices: list[torch.Tensor] = []
        for i in range(len(values.values) + len(self.found)):
            entry = self.found.get(i)
            if entry is not None:
                matrices.append(decoded(entry.rows, entry.scales, torch.float32))
            else:
                rows = torch.from_numpy(np.array(next(run), dtype=np.float32))
                if cache is not None and not are_queries:
                    rows = cache.rounded(Ragged(rows, (0, len(rows)))).decoded(torch.float32).values
                matrices.append(rows)
        vectors = muvera.encode(matrices, "query" if are_queries else "document", yield_to_smaller)
        return EmbedResult(vectors, self.usage, self.truncated, values.timings, muvera)


class EmbeddingProcessor(Processor[EmbedRequest, EmbeddingPlan]):
    """Makes one sequence of each text, token ids or picture, or one of a text with chunks."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._cache = context.embedding_cache
        self._pages = page_builder(context.model, context.tokenizer, context.limits.longest_sequence)

    def prepare(self, request: EmbedRequest, ids: RequestIds) -> EmbeddingPlan:
        if request.chunks is not None:
            return self._with_chunks(request, ids)
        builder = self._builder(request, ids)
        found = self._find(request, builder)
        built = self._read(request, builder, ids, found)
        if request.task == "classify":
            built = [replace(text, tokens=self._model.for_classifier(text.tokens)) for text in built]
        role = Role(request.input_type or "text")
        sequences = [
            TokenSequence.text(ids.next_sequence_id(), ids.slot(i), request.task, text.tokens, role)
            for i, text in enumerate(built)
        ]
        return EmbeddingPlan(
            sequences=sequences,
            num_values=len(sequences),
            truncated=sum(text.truncated for text in built)
            + sum(entry.truncated for entry in found.values()),
            images=self._image_jobs(sequences),
            cached_documents=len(found),
            cached_tokens=sum(entry.tokens for entry in found.values()),
            model=self._model,
            task=request.task,
            found=found,
        )

    def _builder(self, request: EmbedRequest, ids: RequestIds) -> TextBuilder:
        """Returns the builder of the request's role, with the prompt that it names."""
        rules, prompts = self._model.rules(request.input_type), self._model.prompts
        if request.prompt_name is not None:
            if request.prompt_name not in prompts:
                names = ", ".join(sorted(prompts)) or "none"
                raise InvalidRequestError(
                    f"there is no prompt named {request.prompt_name!r}; this model has: {names}",
                    "prompt_name",
                )
            rules = replace(rules, prompt=prompts[request.prompt_name])
        long_inputs = self._limits.applied_to(request.truncation, ids.most_tokens)
        return TextBuilder(self._tokenizer, rules, long_inputs, "input")

    def _read(
        self,
        request: EmbedRequest,
        builder: TextBuilder,
        ids: RequestIds,
        found: Mapping[int, CachedEmbedding],
    ) -> list[BuiltText]:
        """Builds all texts in their order, except those that are `found`."""
        left = {i: text for i, text in enumerate(request.texts) if i not in found}
        indexed = {i: text for i, text in left.items() if isinstance(text, str)}
        encoded = iter(builder.encode([*indexed.values()], indexed))

        def read_page(i: int, content: Content) -> BuiltText:
            assert self._pages is not None
            name = InputName("input", i)
            return self._pages.built(self._pages.opened(content, name), builder.rules, name, ids)

        contents = [(i, text) for i, text in left.items() if isinstance(text, Content)]
        built: list[BuiltText] = []
        num_tokens = 0
        with closing(called_on_each(lambda each: read_page(*each), contents)) as pages:
            for i, text in left.items():
                match text:
                    case str():
                        built.append(builder.build(next(encoded), i))
                    case Content():
                        built.append(next(pages))
                        num_tokens += len(built[-1].tokens)
                        ids.check_tokens(num_tokens)
                    case _:
                        built.append(builder.build_from_ids(text, i))
        tokens, most = sum(len(text.tokens) for text in built), request.max_tokens
        if most is not None and tokens > most:
            raise RequestTooLargeError(
                f"these texts have {tokens} tokens, a vector each, and an answer has room for {most} of them;"
                " send fewer texts at a time, or ask for fewer dimensions"
            )
        return built

    def _find(self, request: EmbedRequest, builder: TextBuilder) -> dict[int, CachedEmbedding]:
        """Returns cached token vectors, by index, if the request takes them and reads texts as scored."""
        is_document = request.input_type == "document" and request.prompt_name is None
        # Documents read through windows or in part have other keys.
        is_document &= not request.truncation.windows and request.truncation.max_document_tokens is None
        if self._cache is None or not (request.takes_cached and is_document):
            return {}
        lookup = CacheLookup(self._cache, False, builder, request.cache_owner)
        indexed = {i: text for i, text in enumerate(request.texts) if isinstance(text, str)}
        found = zip(indexed, lookup.find([*indexed.values()]), strict=True)
        return {i: entry for i, entry in found if isinstance(entry, CachedEmbedding)}

    def _with_chunks(self, request: EmbedRequest, ids: RequestIds) -> EmbeddingPlan:
        """Makes one sequence of a document, which gives a row for each chunk."""
        if (pooling := self._model.tasks["embed"].pooling) != "mean":
            reason = _REASONS.get(pooling, f"this model pools by {pooling}")
            raise InvalidRequestError(
                f"late_chunking is for models that pool by the mean: {reason}; leave it out", "late_chunking"
            )
        if request.truncation.max_tokens not in (None, -1):
            name = request.truncation.option_names.max_tokens
            raise InvalidRequestError(f"late_chunking reads the whole document; leave out {name}", name)
        (document,) = request.texts
        assert isinstance(document, str)
        assert request.chunks is not None
        builder = self._builder(replace(request, truncation=REFUSE_LONG), ids)
        built, origins = builder.whole(document)
        passages = passages_of(document, origins.spans, request.chunks)
        sequence = TokenSequence.passages(
            ids.next_sequence_id(), ids.slot(0), PASSAGES, built.tokens, passages
        )
        return EmbeddingPlan(sequences=[sequence], num_values=1, model=self._model, task=request.task)


def encoding_price(muvera: Muvera, dim: int, input_type: InputType, num_texts: int) -> int:
    """Returns the price in tokens of one vector for each text, and of the random numbers that it needs."""
    drawn = muvera.r_reps * (muvera.k_sim + (muvera.d_proj or 0)) * dim // _DRAWN_PER_TOKEN
    return drawn + num_texts * muvera.whole_length(dim) // _NUMBERS_PER_TOKEN[input_type] + 1


def as_muvera(encoding: Muvera | Literal["muvera"]) -> Muvera:
    """Returns an encoding by name or as given. Raises InvalidRequestError for an unknown name."""
    found = Muvera() if encoding == "muvera" else encoding
    if not isinstance(found, Muvera):
        raise InvalidRequestError(f"encoding {encoding!r} is not known; use muvera", "encoding")
    return found


def check_encoding(
    muvera: Muvera, model: LoadedModel, input_type: InputType | None, others: Mapping[str, bool]
) -> None:
    """Raises InvalidRequestError if texts cannot be encoded: if scores are not MaxSim, vectors do not fit the
    parameters, `input_type` is missing, or one of the `others`, which exclude an encoding, is given."""
    if model.score_task != "token_embed":
        raise InvalidRequestError(
            "encoding is for models that score by late interaction, and this one does not; leave it out, or "
            "run the model with score_type late-interaction",
            "encoding",
        )
    if input_type is None:
        raise InvalidRequestError(
            "queries and documents are encoded unlike; say which they are by input_type query or document",
            "input_type",
        )
    for name, is_given in others.items():
        if is_given:
            raise InvalidRequestError(f"{name} and encoding exclude each other; leave out one", name)
    try:
        muvera.length(model.tasks["token_embed"].dim)
    except ValueError as error:
        raise InvalidRequestError(str(error), "encoding") from None


def shorten(rows: NDArray[np.float32], dimensions: int | None, normalized: bool) -> NDArray[np.float32]:
    """Returns the first `dimensions` columns, L2-normalized again if the model normalizes.

    Source: matryoshka embeddings, Kusupati et al. 2022 (arXiv 2205.13147)."""
    if dimensions is None or dimensions == rows.shape[-1]:
        return rows
    rows = rows[..., :dimensions]
    if normalized:
        rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return rows


def as_document(texts: Sequence[Any], chunks: Any, late_chunking: bool) -> tuple[str, Chunks] | None:
    """Returns a document and its chunks if a request asks for late chunking, else None. Chunks are several
    texts, or the `chunks` of one text: the first character of each and the one after its last."""
    if not late_chunking:
        if chunks is not None:
            raise InvalidRequestError("chunks are for late_chunking; set that, or leave them out", "chunks")
        return None
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(
            "late_chunking reads the texts as the chunks of one document; give strings", "input"
        )
    if chunks is None:
        return "".join(texts), tuple(pairwise(accumulate(map(len, texts), initial=0)))
    if len(texts) != 1:
        raise InvalidRequestError(
            f"chunks are parts of one text, and there are {len(texts)}; give one, or leave chunks out",
            "chunks",
        )
    if not isinstance(chunks, Iterable):
        raise InvalidRequestError("chunks must be pairs of numbers of characters", "chunks")
    pairs = [tuple(pair) if isinstance(pair, Iterable) else () for pair in chunks]
    if not pairs:
        raise InvalidRequestError("chunks is empty; give at least one", "chunks")
    for i, pair in enumerate(pairs):
        if (
            len(pair) != 2
            or not all(isinstance(each, Integral) for each in pair)
            or not 0 <= pair[0] < pair[1] <= len(texts[0])
        ):
            raise InvalidRequestError(
                f"chunks[{i}] must be the first character of a chunk and the one after its last, from 0 to "
                f"{len(texts[0])}",
                "chunks",
            )
    return texts[0], tuple((int(start), int(stop)) for start, stop in pairs)


def passages_of(text: str, spans: Spans, chunks: Chunks) -> NDArray[np.int64]:
    """Returns the first token of each chunk and the one after its last, int64 [chunks, 2]. `spans` has the
    characters [tokens, 2] of each token, -1 for tokens that are not the text's. Raises InvalidRequestError
    for an empty chunk, and for chunks that overlap too much."""
    first_characters = _first_characters(text, spans)
    bounds = np.array(chunks, dtype=np.int64)
    passages = np.searchsorted(first_characters, bounds)  # [chunks, 2]
    lengths = passages[:, 1] - passages[:, 0]
    if not lengths.all():
        raise InvalidRequestError(
            f"chunk {int(np.argmin(lengths))} of the document has no token of its own; "
            "join it to the one beside it",
            "input",
        )
    if int(lengths.sum()) > _MOST_TIMES * len(spans):
        raise InvalidRequestError(
            f"the chunks have together more than {_MOST_TIMES} times the tokens of the text; "
            "let them overlap less",
            "chunks",
        )
    return passages


def _first_characters(text: str, spans: Spans) -> NDArray[np.int64]:
    """Returns the first visible character of each token, or its first if none is visible, ascending.
    Raises InvalidRequestError for a text without tokens."""
    own = np.flatnonzero(spans[:, 0] >= 0)
    if not len(own):
        raise InvalidRequestError("the document has no tokens; leave it out", "input")
    visible = np.array([not character.isspace() for character in text])
    position = np.arange(len(text))
    next_visible = np.minimum.accumulate(np.where(visible, position, len(text))[::-1])[::-1]
    starts = np.minimum(spans[own, 0], len(text) - 1)
    found = np.where(next_visible[starts] < spans[own, 1], next_visible[starts], starts)
    characters = np.empty(len(spans), dtype=np.int64)
    characters[own] = np.maximum.accumulate(found)
    # Other tokens go with the text's token before them, or with its first.
    nearest = np.searchsorted(own, np.arange(len(spans)), side="right") - 1
    return characters[own[np.maximum(nearest, 0)]]
