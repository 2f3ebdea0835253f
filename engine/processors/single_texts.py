"""Requests to embed or classify texts or pictures, each a sequence by itself."""

from collections.abc import Iterator
from dataclasses import replace

from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.media import Content
from maxsimd.engine.processors.cache_lookup import CacheLookup
from maxsimd.engine.processors.late_chunking import LateChunking
from maxsimd.engine.processors.pages import image_jobs, page_builder
from maxsimd.engine.processors.prepared import Prepared
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.long_inputs import InputName, LengthLimits, LongInputs
from maxsimd.engine.processors.text.texts import BuiltText, TextBuilder, shortest_text
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import EmbedRequest
from maxsimd.engine.workers import called_on_each
from maxsimd.scheduler import Role, Sequence

_ROLES = {"query": Role.QUERY, "document": Role.DOCUMENT}


class TextStrategy:
    """Turns texts into sequences for one model; `cache` has embeddings of documents. Thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: TextTokenizer,
        limits: LengthLimits,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._tokenizer = tokenizer
        self._limits = limits
        self._late_chunking = LateChunking(model, tokenizer, limits)
        self._pages = page_builder(model, tokenizer, limits.longest_sequence)

    def prepare(self, request: EmbedRequest, ids: RequestIds) -> Prepared:
        """One sequence a text or picture, in order; one for a text with chunks."""
        if request.chunks is not None:
            return self._late_chunking.prepare(request, self._rules(request), ids)
        long_inputs = self._limits.applied_to(request.truncation, ids)
        builder = TextBuilder(self._tokenizer, self._rules(request), long_inputs, "input")
        cached = self._cached(request, long_inputs, builder)
        left = {i: text for i, text in enumerate(request.texts) if i not in cached}
        indexed = {i: text for i, text in left.items() if isinstance(text, str)}
        encoded = iter(builder.encode([*indexed.values()], indexed))
        pages = self._read(request, builder.rules, ids)
        built: list[BuiltText] = []
        num_tokens = 0
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
        if request.task == "classify":
            built = [replace(text, tokens=self._model.for_classifier(text.tokens)) for text in built]
        _check_tokens(sum(len(text.tokens) for text in built), request.max_tokens)
        role = _ROLES.get(request.input_type or "", Role.TEXT)
        sequences = [
            Sequence.text(ids.next_sequence_id(), ids.slot(i), request.task, text.tokens, role)
            for i, text in enumerate(built)
        ]
        images = image_jobs(self._model.vision, sequences)
        return Prepared(
            sequences,
            len(sequences),
            sum(text.truncated for text in built) + sum(entry.truncated for entry in cached.values()),
            images=images,
            cached_documents=len(cached),
            cached_tokens=sum(entry.tokens for entry in cached.values()),
            cached_rows=cached,
        )

    def _cached(
        self, request: EmbedRequest, long_inputs: LongInputs, builder: TextBuilder
    ) -> dict[int, CachedEmbedding]:
        """What is cached of the texts, by their index, for a request that takes it from there: they must be
        read as documents are that are scored."""
        is_document = request.input_type == "document" and request.prompt_name is None
        # Documents that are scored through windows, or of which some tokens are read, are cached as such.
        is_document &= not request.truncation.windows and request.truncation.max_document_tokens is None
        if self._cache is None or not (request.takes_cached and is_document):
            return {}
        lookup = CacheLookup(self._cache, False, long_inputs, builder.own_length, request.cache_owner)
        indexed = {i: text for i, text in enumerate(request.texts) if isinstance(text, str)}
        found = zip(indexed, lookup.find([*indexed.values()]), strict=True)
        return {i: entry for i, entry in found if isinstance(entry, CachedEmbedding)}

    def _read(self, request: EmbedRequest, rules: RoleRules, ids: RequestIds) -> Iterator[BuiltText]:
        """The sequences of contents with pictures."""
        pages = self._pages
        contents = [(i, text) for i, text in enumerate(request.texts) if isinstance(text, Content)]
        if pages is None:
            assert not contents
            return iter(())

        def read(indexed: tuple[int, Content]) -> BuiltText:
            name = InputName("input", indexed[0])
            return pages.built(pages.opened(indexed[1], name), rules, name, ids)

        return called_on_each(read, contents)

    def shortest_sequences(self) -> dict[str, int]:
        """How many tokens the shortest text has, by what errors call it."""
        return {"a text": shortest_text(self._model.text, self._tokenizer)}

    def _rules(self, request: EmbedRequest) -> RoleRules:
        """The rules of the request's role, with the prompt that it names."""
        rules = self._model.rules(request.input_type)
        if request.prompt_name is None:
            return rules
        prompts = self._model.prompts
        if request.prompt_name not in prompts:
            names = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequestError(
                f"there is no prompt named {request.prompt_name!r}; this model has: {names}", "prompt_name"
            )
        return replace(rules, prompt=prompts[request.prompt_name])


def _check_tokens(tokens: int, most: int | None) -> None:
    if most is not None and tokens > most:
        raise RequestTooLargeError(
            f"these texts have {tokens} tokens, a vector each, and an answer has room for {most} of them; "
            "send fewer texts at a time, or ask for fewer dimensions"
        )
