"""Scores of labels by a language model: the probabilities of tokens as the next one behind a prompt.

A prompt is a query and a document, one behind the other, as in SGLang's scoring API and vLLM's generative
scoring. The query's tokens run once for all prompts that begin with them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.model import LABEL_SCORES
from maxsimd.engine.checkpoint.output_layer import DOCUMENT_FIRST, QUERY_FIRST, OutputLayer
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.cross_encoder import (
    BuiltPair,
    CrossEncoderProcessor,
    TemplatePairBuilder,
    pair_sequences,
)
from maxsimd.engine.processors.processor import Plan, Processor, ProcessorContext, RequestIds
from maxsimd.engine.processors.prompted_ranking import PromptForm, RankingPrompts
from maxsimd.engine.processors.text.builder import FittedText, InputName, checked_ids
from maxsimd.engine.requests import (
    CUT_LONG,
    Ids,
    LabelRequest,
    LabelScores,
    ScoreOptions,
    ScoreRequest,
    Values,
)
from maxsimd.scheduler import JoinedTokens
from maxsimd.scheduler.sequence import TokenIds

# The most labels of a request.
MOST_LABELS = 1024
# The most tokens that an error shows.
_SHOWN = 8
_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LabelPlan(Plan):
    """One value for each document: its prompt's item of the output layer."""

    output: OutputLayer

    def input_of(self, value: int) -> str:
        return f"documents[{value}]"

    def scores(self, values: Values, labels: tuple[int, ...], apply_softmax: bool) -> LabelScores:
        items = np.concatenate([np.asarray(value) for value in values.values])
        found = np.exp(self.output.log_probabilities(items, labels, apply_softmax))
        return LabelScores(found, labels, self.usage, values.timings)


class LabelProcessor(Processor[LabelRequest, LabelPlan]):
    """Makes one sequence of each prompt, or of what follows the query in it."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        model = context.model
        head, template = model.tasks[LABEL_SCORES].head, model.pairs.template
        assert isinstance(head, OutputLayer)
        assert template is not None
        self.output = head
        # By whether the document comes first, and whether there are special tokens.
        self._builders = {
            (bool(first), special): TemplatePairBuilder(context.tokenizer, made, None)
            for first, prompt in enumerate((QUERY_FIRST, DOCUMENT_FIRST))
            for special, made in (
                (True, replace(template, segments=(*template.segments[:-1], prompt))),
                (False, ScoreTemplate((prompt,))),
            )
        }

    def prepare(self, request: LabelRequest, ids: RequestIds) -> LabelPlan:
        pairs, num_tokens = [], 0
        for pair in self._pairs(request, ids):
            num_tokens += sum(map(len, pair.windows))
            ids.check_tokens(num_tokens)
            pairs.append(pair)
        sequences = pair_sequences(pairs, self._context.sharing, ids, LABEL_SCORES)
        return LabelPlan(sequences=sequences, num_values=len(pairs), output=self.output)

    def label_ids(self, labels: Sequence[int | str]) -> tuple[int, ...]:
        """Returns the token ids of labels, each given as that or as a text of one token. Raises
        InvalidRequestError for others."""
        if not labels:
            raise InvalidRequestError("labels is empty; give at least one", "labels")
        if len(labels) > MOST_LABELS:
            raise InvalidRequestError(
                f"labels has {len(labels)} entries, but at most {MOST_LABELS} are taken at a time", "labels"
            )
        return tuple(self._label_id(label, InputName("labels", i)) for i, label in enumerate(labels))

    def _label_id(self, label: int | str, name: InputName) -> int:
        if isinstance(label, str):
            (ids,) = self._tokenizer.encode([label], "labels", _SHOWN + 1, names=[name])
            if len(ids) != 1:
                shown = ", ".join(map(repr, self._tokenizer.strings(ids[:_SHOWN].tolist()))) or "nothing"
                more = ", ..." if len(ids) > _SHOWN else ""
                raise name.error(
                    f"must be one token, and {label[:80]!r} is {shown}{more}; name a part of it, with or "
                    "without a space before it, or a token id"
                )
            return int(ids[0])
        if isinstance(label, bool) or not 0 <= label < self.output.num_tokens:
            raise name.error(f"must be a token id from 0 to {self.output.num_tokens - 1}, not {label}")
        return int(label)

    def _pairs(self, request: LabelRequest, ids: RequestIds) -> Iterator[BuiltPair]:
        if not isinstance(request.query, str):
            yield from self._of_ids(request)
        elif request.tokenized_apart:
            yield from self._of_ids(self._tokenized(request))
        else:
            yield from self._of_texts(request, ids)

    def _of_texts(self, request: LabelRequest, ids: RequestIds) -> Iterator[BuiltPair]:
        texts = ScoreRequest(
            queries=(cast("str", request.query),),
            documents=cast("tuple[str, ...]", request.documents),
            truncation=CUT_LONG,
        )
        builder = self._builders[request.document_first, request.add_special_tokens]
        long_inputs = self._limits.applied_to(CUT_LONG, ids.most_tokens)
        for i, pair in enumerate(builder.build(texts, [FittedText(_NONE)], long_inputs)):
            if pair.truncated:
                raise self._too_long(i)
            yield pair

    def _tokenized(self, request: LabelRequest) -> LabelRequest:
        """The request with its texts' tokens, of long texts as many as show that they are too long."""
        most = self._limits.longest_sequence + 1
        (query,) = self._tokenizer.encode([cast("str", request.query)], "query", most)
        if request.add_special_tokens:
            before, after = self._tokenizer.single.ids
            query = np.concatenate([before, query, after])
        names = [InputName("documents", i) for i in range(len(request.documents))]
        texts = cast("tuple[str, ...]", request.documents)
        documents = self._tokenizer.encode(texts, "documents", most, names=names)
        if not len(query) and not all(map(len, documents)):
            raise InvalidRequestError("a prompt has no tokens; give the query a text", "query")
        return replace(request, query=query, documents=tuple(documents))

    def _of_ids(self, request: LabelRequest) -> Iterator[BuiltPair]:
        query = self._known(cast("Ids", request.query), InputName("query", 0))
        prefix = _NONE if request.document_first else query
        for i, given in enumerate(cast("tuple[Ids, ...]", request.documents)):
            document = self._known(given, InputName("documents", i))
            parts: tuple[TokenIds, ...] = (query, document)
            parts = parts[::-1] if request.document_first else parts
            if len(query) + len(document) > self._limits.longest_sequence:
                raise self._too_long(i)
            yield BuiltPair([JoinedTokens.of(parts, (0, 0))], prefix, truncated=False)

    def _known(self, ids: Ids, name: InputName) -> TokenIds:
        return ids if isinstance(ids, np.ndarray) else checked_ids(ids, self._tokenizer, name)

    def _too_long(self, document: int) -> InvalidRequestError:
        return InputName("documents", document).error(
            f"and the query have more than the {self._limits.longest_sequence} tokens that can be run; "
            "shorten them"
        )


class LanguageModelProcessor(CrossEncoderProcessor):
    """Ranks documents by prompts that show several, in rounds (`Engine.rerank`), and scores the labels of
    requests."""

    scores_together = True
    _task = LABEL_SCORES

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.labels = LabelProcessor(context)

    @classmethod
    def is_for(cls, model: LoadedModel) -> bool:
        return model.score_task == LABEL_SCORES

    def check_options(self, options: ScoreOptions) -> None:
        for name, usual in (("on_timeout", "error"), ("on_error", "fail"), ("explain", False)):
            if options[name] != usual:  # type: ignore[literal-required]
                raise InvalidRequestError(
                    f"a language model ranks documents by each other, in prompts: leave out {name}", name
                )

    @cached_property
    def _form(self) -> PromptForm:
        return PromptForm.of(self._model.tokenizer, self._tokenizer)

    def ranking_prompts(self, request: ScoreRequest) -> RankingPrompts:
        """Reads a request to rank. Raises InvalidRequestError."""
        if len(request.queries) > 1:
            raise InvalidRequestError(
                "a language model ranks the documents of one query; send each query by itself", "queries"
            )
        if request.truncation.windows:
            name = request.truncation.option_names.allow
            raise InvalidRequestError(
                f"a language model does not read documents in windows; truncate or refuse them ({name})",
                "truncation",
            )
        request = self._with_texts(request)
        if request.instruction is None:
            request = replace(request, instruction=self._model.instruction)
        long_inputs = self._limits.applied_to(request.truncation)
        return RankingPrompts.of(self._form, self._tokenizer, request, long_inputs)
