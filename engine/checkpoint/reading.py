"""Readers: what a checkpoint's own library makes of texts, from the text to token ids, types and masks.

The preprocessing of requests is compared with them when a checkpoint is served for the first time.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.scheduler.sequence import TokenIds

log = logging.getLogger(__name__)

TextRole = Literal["query", "document"]

# Names under which sentence-transformers looks for the prompt of documents, in its order.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# A character that no text has, to find where a template writes the document.
_PLACE = "\ue0a3"


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Token ids [n] of a text or a pair, and type ids [n] where the library makes them.

    The first `attended` tokens are attended to, and those at `scored`, ascending, take part in pooling or
    scoring (None for all)."""

    ids: TokenIds
    type_ids: TokenIds | None
    attended: int
    scored: NDArray[np.int64] | None = None


def prompt_of_documents(path: str, prompts: Mapping[str, str]) -> str:
    """The prompt that sentence-transformers puts before documents. Logs a warning where there is one under
    another name, which it leaves out because its models have an empty one named document."""
    named = [name for name in _DOCUMENT_PROMPTS if name in prompts]
    if not named:
        return ""
    unused = [name for name in named[1:] if prompts[name]]
    if unused and not prompts[named[0]]:
        log.warning(
            "the prompt %r of %s is not used for documents, as in sentence-transformers; set "
            "document_prompt to use it",
            unused[0],
            path,
        )
    return prompts[named[0]] or ""


class Reader:
    """Reads texts as the checkpoint's own `library` or model card does, truncated to `limit` tokens, special
    tokens included, or to fewer where the checkpoint says so."""

    library = "transformers"

    def text(self, text: str, role: TextRole | None, prompt: str | None, limit: int) -> Reading:
        """A text in a role. `prompt` replaces the one of the checkpoint; None leaves it."""
        raise NotImplementedError

    def pair(self, query: str, document: str, instruction: str | None, limit: int) -> Reading:
        """A query and a document that are read together. `instruction` replaces the checkpoint's own."""
        raise NotImplementedError


class LibraryReader(Reader):
    """Reads with a model of sentence-transformers.

    The tokens of its `mask` take part in scoring. With `leaves_prompt_out` those of a prompt are not pooled.
    `can_score` says whether the library scores with it as is done here, and with all of its layers."""

    library = "sentence-transformers"

    def __init__(
        self, model: Any, mask: Any = None, leaves_prompt_out: bool = False, can_score: bool = True
    ) -> None:
        self.can_score = can_score
        self._model = model
        self._mask = mask
        self._leaves_prompt_out = leaves_prompt_out
        # A Router's routes have one each.
        routes = getattr(model[0], "sub_modules", {}).values()
        found = [getattr(module, "tokenizer", None) for module in (model[0], *(each[0] for each in routes))]
        self._tokenizers = list({id(each): each for each in found if each is not None}.values())

    def text(self, text: str, role: TextRole | None, prompt: str | None, limit: int) -> Reading:
        used = self._prompt_of(role) if prompt is None else prompt
        task = {} if role is None else {"task": role}
        with _limited(self._tokenizers, limit):
            features = dict(self._model.preprocess([text], prompt=used, **task))
        return self._reading(features, role)

    def pair(self, query: str, document: str, instruction: str | None, limit: int) -> Reading:
        prompt = self._model._resolve_prompt(instruction, None)
        with _limited(self._tokenizers, limit):
            features = dict(self._model.preprocess([(query, document)], prompt=prompt))
        return self._reading(features, None)

    def scores(
        self,
        query: str,
        documents: Sequence[str],
        prompts: tuple[str | None, str | None],
        instruction: str | None,
        limit: int,
    ) -> list[float]:
        """The scores of documents by the library alone, from texts. `prompts` replace those of queries and
        documents, where they are not None."""
        with _limited(self._tokenizers, limit):
            if hasattr(self._model, "predict"):
                pairs = [(query, document) for document in documents]
                scores = self._model.predict(pairs, prompt=instruction, show_progress_bar=False)
                return [float(score) for score in scores]
            of_query = self._model.encode_query([query], prompt=prompts[0], show_progress_bar=False)
            encoded = self._model.encode_document(list(documents), prompt=prompts[1], show_progress_bar=False)
        return [float(score) for score in self._model.similarity(of_query, encoded)[0]]

    def _prompt_of(self, role: TextRole | None) -> str | None:
        """The prompt that `encode_query`, `encode_document` or `encode` would choose."""
        names = {"query": ("query",), "document": _DOCUMENT_PROMPTS}[role] if role is not None else ()
        name = next((name for name in names if name in self._model.prompts), None)
        prompt: str | None = self._model._resolve_prompt(None, name)
        return prompt

    def _reading(self, features: dict[str, Any], role: TextRole | None) -> Reading:
        ids = features["input_ids"][0]
        mask = features.get("attention_mask")
        attended = len(ids) if mask is None else int(mask[0].sum())
        if mask is not None and not bool(mask[0, :attended].all()):
            raise ValueError("tokens are left out of attention before others")
        scored = None
        if self._mask is not None:
            scored = self._mask(dict(features), task=role)["attention_mask"][0].nonzero()[:, 0].numpy()
        elif self._leaves_prompt_out and features.get("prompt_length"):
            scored = np.arange(min(int(features["prompt_length"]), attended), attended)
        types = features.get("token_type_ids")
        type_ids = None if types is None else types[0].numpy().astype(np.int32)
        return Reading(ids.numpy().astype(np.int32), type_ids, attended, scored)


class TemplateReader(Reader):
    """Reads pairs by a score template as model cards do: each segment is written with the texts in it and
    tokenized whole. Of a pair that is too long the end of the document is left out."""

    def __init__(self, tokenizer: Any, template: ScoreTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def pair(self, query: str, document: str, instruction: str | None, limit: int) -> Reading:
        segments = self._template.written(query, document, instruction)
        places = self._template.written(query, _PLACE, instruction)
        ids: list[int] = []
        types: list[int] = []
        inside: list[int] = []
        for segment, place in zip(segments, places, strict=True):
            encoded = self._tokenizer(
                segment, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            has_document = _PLACE in place
            if has_document:
                before, after = len(place.partition(_PLACE)[0]), len(place.rpartition(_PLACE)[2])
                stop = len(segment) - after
                inside += [
                    len(ids) + i
                    for i, (first, last) in enumerate(encoded["offset_mapping"])
                    if last > before and first < stop
                ]
            ids += encoded["input_ids"]
            types += [int(has_document and self._template.marks_document)] * len(encoded["input_ids"])
        trailing = self._template.trailing_ids
        surplus = max(0, len(ids) + len(trailing) - limit)
        if surplus > len(inside):
            raise ValueError("there is no room for the document")
        left_out = inside[len(inside) - surplus :]
        read = np.append(np.delete(ids, left_out), trailing).astype(np.int32)
        of_types = np.append(np.delete(types, left_out), [0] * len(trailing)).astype(np.int32)
        return Reading(read, of_types, len(read))


class ProcessorReader(Reader):
    """Reads texts as the processor of a `*ForRetrieval` model writes queries, whatever their role. It does
    not truncate them."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def text(self, text: str, role: TextRole | None, prompt: str | None, limit: int) -> Reading:
        made = self._processor.process_queries(text=[(prompt or "") + text])["input_ids"]
        ids = np.asarray(made, dtype=np.int32)[0]
        if len(ids) > limit:
            raise ValueError(f"the processor truncates no texts, and this one has {len(ids)} tokens")
        return Reading(ids, None, len(ids))


class TokenizerReader(Reader):
    """Reads texts with a tokenizer of transformers alone, and pairs as one text of a `form` that has the
    places {query} and {document}."""

    def __init__(self, tokenizer: Any, form: str = "") -> None:
        self._tokenizer = tokenizer
        self._form = form

    def text(self, text: str, role: TextRole | None, prompt: str | None, limit: int) -> Reading:
        encoded = self._tokenizer((prompt or "") + text, truncation=True, max_length=limit)
        types = encoded.get("token_type_ids")
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        return Reading(ids, None if types is None else np.array(types, dtype=np.int32), len(ids))

    def pair(self, query: str, document: str, instruction: str | None, limit: int) -> Reading:
        before, between, after = self._form.replace("{document}", "{query}").split("{query}")
        return self.text(f"{before}{query}{between}{document}{after}", None, None, limit)


@contextmanager
def without_messages(module: str, beginning: str) -> Iterator[None]:
    """Drops messages of a module of sentence-transformers that have this beginning."""
    logger = logging.getLogger(f"sentence_transformers.{module}")

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


@contextmanager
def _limited(tokenizers: list[Any], limit: int) -> Iterator[None]:
    """Has tokenizers truncate to at most `limit` tokens inside this context."""
    before = [tokenizer.model_max_length for tokenizer in tokenizers]
    try:
        for tokenizer in tokenizers:
            tokenizer.model_max_length = min(limit, tokenizer.model_max_length)
        # It warns of our own texts, which fill a query's length.
        with without_messages("base.modules.transformer", "One or more queries filled"):
            yield
    finally:
        for tokenizer, length in zip(tokenizers, before, strict=True):
            tokenizer.model_max_length = length
