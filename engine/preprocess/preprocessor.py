"""The door to preprocessing: chooses by what the model is how a request becomes sequences."""

from collections.abc import Iterator
from dataclasses import replace

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.checkpoint.model import INSTRUCT
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.documents import DocumentReader
from maxsimd.engine.preprocess.listwise import listwise
from maxsimd.engine.preprocess.long_inputs import LongInputs
from maxsimd.engine.preprocess.pairs import pairs
from maxsimd.engine.preprocess.prepared import Prepared
from maxsimd.engine.preprocess.texts import TextBuilder
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.preprocess.two_stage import two_stages
from maxsimd.engine.requests import EmbedRequest, ScoreRequest, Truncation
from maxsimd.scheduler import ResultSlot, Role, Sequence

_ROLES = {"query": Role.QUERY, "document": Role.DOCUMENT}


class Preprocessor:
    """Turns requests into sequences for one model. Thread-safe.

    `longest_sequence` is the most tokens that the engine can run in one sequence, and `window_overlap` how
    many the windows of a long document share. Documents that are in the `cache` are not run again, and with
    `share_prefixes` neither is what all pairs of a query begin with.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: TextTokenizer,
        longest_sequence: int,
        window_overlap: int,
        cache: EmbeddingCache | None,
        share_prefixes: bool,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._longest = min(model.max_tokens, longest_sequence)
        self._window_overlap = window_overlap
        self._cache = cache
        self._share_prefixes = share_prefixes

    def score(self, request: ScoreRequest, owner: int, keys: Iterator[int]) -> Prepared:
        """The sequences of a score request."""
        model = self._model
        if request.instruction is not None and not model.takes_instruction:
            raise InvalidRequestError("this model takes no instruction; leave it out", "instruction")
        instruction = request.instruction or model.instruction
        long_inputs = self._long_inputs(request.truncation)
        if model.listwise is not None:
            return listwise(request, model.listwise, instruction, self._tokenizer, long_inputs, owner, keys)
        if model.score_task == "classify":
            return pairs(
                request,
                model.pairs,
                instruction,
                self._tokenizer,
                long_inputs,
                owner,
                keys,
                self._share_prefixes,
            )
        rules = _instructed(model.query, instruction)
        queries = self._builder(rules, long_inputs, "queries", long_inputs.max_query_tokens)
        documents = DocumentReader(
            self._builder(model.document, long_inputs, "documents", long_inputs.max_document_tokens),
            long_inputs,
            None if request.cache == "bypass" else self._cache,
        )
        return two_stages(request, queries, documents, model.score_task, owner, keys)

    def embed(self, request: EmbedRequest, owner: int, keys: Iterator[int]) -> Prepared:
        """The sequences of texts to embed or classify, in their order."""
        long_inputs = self._long_inputs(request.truncation)
        builder = self._builder(self._rules(request), long_inputs, "input")
        texts = iter(builder.encode(tuple(text for text in request.texts if isinstance(text, str))))
        role = _ROLES.get(request.input_type or "", Role.TEXT)
        sequences, truncated = [], 0
        for i, text in enumerate(request.texts):
            parts = builder.build(next(texts), i) if isinstance(text, str) else builder.given(text, i)
            truncated += parts.truncated
            sequences.append(
                Sequence.text(next(keys), ResultSlot(owner, i), request.task, parts.tokens, role)
            )
        return Prepared(sequences, len(sequences), truncated)

    def _rules(self, request: EmbedRequest) -> RoleRules:
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

    def _long_inputs(self, truncation: Truncation) -> LongInputs:
        return LongInputs(truncation, self._longest, self._window_overlap)

    def _builder(
        self, rules: RoleRules, long_inputs: LongInputs, param: str, most: int | None = None
    ) -> TextBuilder:
        return TextBuilder(self._tokenizer, rules, long_inputs, param, most)


def _instructed(rules: RoleRules, instruction: str | None) -> RoleRules:
    """The rules for queries with another instruction in their prompt, if there is one."""
    if instruction is None:
        return rules
    return replace(
        rules, prompt=INSTRUCT.sub(lambda found: f"{found[1]}{instruction}{found[2]}", rules.prompt)
    )
