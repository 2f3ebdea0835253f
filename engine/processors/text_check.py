"""Checks preprocessing at load against the checkpoint's own library, with difficult texts."""

import logging
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.checkpoint.files import one_line
from maxsimd.engine.checkpoint.load import library_reader
from maxsimd.engine.checkpoint.model import TOKEN_CLASSIFY
from maxsimd.engine.checkpoint.reading import Reader, Reading, TextRole
from maxsimd.engine.checkpoint.recipe_store import knows_texts, remember_texts, texts_content
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.processors.listwise import listwise_prompt
from maxsimd.engine.processors.processor import ProcessorContext, RequestIds
from maxsimd.engine.processors.registry import Processors, check_room
from maxsimd.engine.processors.text.builder import LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import CUT_LONG, EmbedRequest, ScoreRequest
from maxsimd.scheduler import JoinedTokens, ResultSlot, Role, Tokens, TokenSequence
from maxsimd.scheduler.sequence import AnyTokens

log = logging.getLogger(__name__)

# The longest sequence that the model is tried with.
_LONGEST_SAMPLE = 512
# Special tokens that are tried one by one, and added ones that are tried together.
_SPECIAL, _ADDED = 12, 48
# A tokenizer's limit of this size or more means none; the default then applies.
_NO_LIMIT, _DEFAULT_LIMIT = 1_000_000, 512
_NEITHER, _LABELED = "a text", "a text to label"
_QUERY = "how is a file opened"
_DOCUMENT = "Paris is the capital of France; some 2,100,000 people live there."
_INSTRUCTION = "Find the passage that answers"
# Texts of words like these have as many tokens as words.
_WORDS = ("a", "the", "w1", "1", "e")


# A name and a text.
_Probe: TypeAlias = tuple[str, str]


def check_texts(
    model: LoadedModel, config: EngineConfig, tokenizer: TextTokenizer, content: str | None
) -> str | None:
    """Compares preprocessing with the checkpoint's own library, and says how many texts were compared; None
    if they were before. `content` is the `texts_content` from before the model was read. With None it is not
    remembered. Raises ModelLoadError if a text is read differently."""
    if content is not None and knows_texts(content):
        return None
    started = time.perf_counter()
    check_room(model, tokenizer, budget=0, chunked=True)  # says best why no text can be read
    reader = library_reader(config) if model.reader is None else model.reader
    check = _Check(model, config, tokenizer, reader)
    compared = check.run()
    log.debug("%d texts are read as by %s: %.2f s", compared, reader.library, time.perf_counter() - started)
    # Files may have been replaced meanwhile, and a reader may have failed for want of memory.
    if content is not None and check.is_whole and content == texts_content(config):
        remember_texts(content)
    return f"{compared} texts and pairs, the same token ids, types and masks"


def in_library_terms(
    model: LoadedModel, config: EngineConfig, query: str, instruction: str | None
) -> tuple[str, str | None]:
    """Returns the query and instruction with which a reader reads a pair as it is read here."""
    used = config.instruction if instruction is None else instruction
    if model.pairs.template is not None:
        return (config.query_prompt or "") + query, used
    if used is not None and model.query.takes_instruction:
        return query, model.query.instructed(used).prompt
    return query, config.query_prompt


class _Check:
    """Compares one model's preprocessing with a reader."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig, tokenizer: TextTokenizer, reader: Reader
    ) -> None:
        self._model = model
        self._config = config
        self._reader = reader
        self._tokenizer = tokenizer
        self._ours = _Preprocessed(model, tokenizer, model.max_tokens)
        self._limit = _limit_of(model, config)
        self._probes = _short_probes(model)
        self._compared: Counter[str] = Counter()
        self._refusal = ""
        # The library's first error for each kind of text.
        self._failures: dict[str, str] = {}
        # Whether the library failed only for texts that it refuses.
        self.is_whole = True

    def run(self) -> int:
        """Returns the number of compared probes. Raises ModelLoadError."""
        if self._model.listwise is not None:
            self._listwise()
        elif self._model.score_task == TOKEN_CLASSIFY:
            for probe in [*self._probes, *self._long_texts(None)]:
                self._text(*probe, _LABELED, None, None)
        elif self._model.reads_pairs:
            self._pairs()
        else:
            self._apart()
        for kind, failure in self._failures.items():
            if self._compared[kind]:
                continue
            reason = f"{self._reader.library} does not read {kind}: {failure}".rstrip(".")
            if kind != _NEITHER:
                raise ModelLoadError(f"{self._model.name!r} is not served: {reason}; check its configuration")
            # Scores do not depend on these.
            log.warning("embed texts of %s as queries or documents: %s", self._model.name, reason)
        if not self._compared:
            raise ModelLoadError(f"none of the texts of the self-check can be read: {self._refusal}")
        return self._compared.total()

    # Queries and documents that are read apart, and texts that are neither.

    def _apart(self) -> None:
        model, config = self._model, self._config
        prompts = {"query": config.query_prompt, "document": config.document_prompt}
        if config.instruction is not None:
            prompts["query"] = model.query.instructed(config.instruction).prompt
        roles: tuple[TextRole | None, ...] = ("query", "document", None)
        for role in roles:
            kind = _NEITHER if role is None else f"a {role}"
            prompt = None if role is None else prompts[role]
            text, document = model.text, model.document
            plain = all(each.expansion is None and each.chat is None for each in (text, document))
            alike = (text.prompt, text.max_tokens) == (document.prompt, document.max_tokens)
            same = role is None and plain and alike
            probes = self._probes[:2] if same else [*self._probes, *self._long_texts(role)]
            for probe in probes:
                self._text(*probe, kind, role, prompt)
        for name, prompt in model.prompts.items():
            kind = f"a text behind the prompt {name!r}"
            self._text("a short text", _DOCUMENT, kind, None, prompt, prompt_name=name)
        if model.query.takes_instruction:
            prompt = model.query.instructed(_INSTRUCTION).prompt
            self._text(*self._probes[0], "a query with an instruction", "query", prompt, _INSTRUCTION)

    def _text(
        self,
        name: str,
        text: str,
        kind: str,
        role: TextRole | None,
        prompt: str | None,
        instruction: str | None = None,
        prompt_name: str | None = None,
    ) -> None:
        self._compare(
            name,
            kind,
            partial(self._ours.text, text, role, instruction, prompt_name),
            partial(self._reader.text, text, role, prompt, self._limit_in(role)),
            self._model.rules(role),
        )

    def _limit_in(self, role: TextRole | None) -> int:
        """Returns the most tokens of a text in a role, less the special ones that a lookup leaves out."""
        rules = self._model.rules(role)
        around = 0 if rules.pool_specials else self._tokenizer.single.special_tokens
        # Lengths of roles are the library's own; a longer one has raised the tokenizer's limit.
        own = rules.max_tokens if role is None else None
        return min(self._limit - around, own or self._limit)

    # Queries and documents that are read together.

    def _pairs(self) -> None:
        texts = self._probes
        for (name, query), (other, document) in zip(texts, [*texts[1:], texts[0]], strict=True):
            self._pair(f"{name}, and {other}", query, document)
        for name, query, document in self._long_pairs():
            self._pair(name, query, document)
        if self._model.takes_instruction:
            self._pair("an instruction", _QUERY, _DOCUMENT, _INSTRUCTION)

    def _pair(self, name: str, query: str, document: str, instruction: str | None = None) -> None:
        read_query, used = in_library_terms(self._model, self._config, query, instruction)
        self._compare(
            name,
            "a pair",
            partial(self._ours.together, query, [document], instruction),
            partial(self._reader.pair, read_query, document, used, self._limit),
            self._model.text,
        )

    def _listwise(self) -> None:
        rules = self._model.listwise
        assert rules is not None
        for name, text in self._probes:
            # The model's own code takes its markers out of texts.
            cleaned = text.replace(rules.query_marker, "").replace(rules.document_marker, "")
            prompt = listwise_prompt(_QUERY, [cleaned, _DOCUMENT], self._config.instruction, rules)
            ours = partial(self._ours.together, _QUERY, [text, _DOCUMENT])
            theirs = partial(self._reader.text, prompt, None, None, self._limit)
            self._compare(name, "a document", ours, theirs, self._model.text)

    def _compare(
        self,
        name: str,
        kind: str,
        ours: Callable[[], AnyTokens],
        theirs: Callable[[], Reading],
        rules: RoleRules,
    ) -> None:
        """Raises ModelLoadError if both read a text differently. Skips texts that one of them refuses."""
        try:
            found = ours()
        except InvalidRequestError as error:
            self._refusal = self._refusal or str(error)
            return
        try:
            expected = theirs()
        except Exception as error:
            if isinstance(error, ValueError):
                self._failures.setdefault(kind, one_line(error))
            self.is_whole = self.is_whole and isinstance(error, ValueError)
            log.debug("%s does not read %s as %s: %s", self._reader.library, name, kind, error)
            return
        if len(expected.ids) > self._limit:  # the library does not truncate, and its model cannot read it
            return
        if self._model.score_task == "classify":
            # The classifier reads no further than its token.
            types = np.zeros_like(expected.ids) if expected.type_ids is None else expected.type_ids
            tokens = self._model.for_classifier(Tokens(expected.ids, types))
            attended = min(expected.attended, len(tokens))
            expected = Reading(tokens.ids, tokens.type_ids, attended, tokens.pooled_positions)
        difference = self._difference(found, expected, rules)
        if difference is not None:
            raise ModelLoadError(
                f"{self._model.name!r} is not served: {self._reader.library} reads {kind} ({name}) "
                "differently: "
                f"{difference}; use {self._reader.library} for it, or report it with this message"
            )
        self._compared[kind] += 1

    def _difference(self, found: AnyTokens, expected: Reading, rules: RoleRules) -> str | None:
        """Returns the first difference between a sequence and a reading, in words."""
        ids = found.ids
        types = np.zeros_like(ids) if found.type_ids is None else found.type_ids
        wanted, attended = expected.ids, expected.attended
        if not rules.pool_specials and found.pooled_positions is not None:
            # The library reads such texts without special tokens, which are not scored here.
            ids, types = ids[found.pooled_positions], types[found.pooled_positions]
        if rules.last_id is not None and rules.last_id in wanted:
            wanted = wanted[: int(np.argmax(wanted == rules.last_id)) + 1]
            attended = min(attended, len(wanted))
        if not np.array_equal(ids, wanted):
            both = min(len(ids), len(wanted))
            apart = np.flatnonzero(ids[:both] != wanted[:both])
            if not len(apart):
                return f"it has {len(wanted)} tokens, not {len(ids)}"
            at = int(apart[0])
            ours, theirs = (f"{each[at]} {self._tokenizer.token(int(each[at]))!r}" for each in (ids, wanted))
            return f"token {at} is {theirs}, not {ours}"
        if self._model.takes_type_ids:
            wanted_types = np.zeros_like(wanted) if expected.type_ids is None else expected.type_ids
            if not np.array_equal(types, wanted_types[: len(types)]):
                at = int(np.argmax(types != wanted_types[: len(types)]))
                return f"token {at} has type {types[at]}, not {wanted_types[at]}"
        if not rules.pool_specials:
            return None
        if found.num_attended != attended:
            return f"{found.num_attended} tokens are attended to, not {attended}"
        if rules.pool_first and self._model.listwise is None:
            pooled, scored = (
                np.arange(len(ids)) if positions is None else positions
                for positions in (found.pooled_positions, expected.scored)
            )
            if not np.array_equal(pooled, scored):
                return f"{len(pooled)} tokens are pooled, not {len(scored)}, or others"
        return None

    def _long_texts(self, role: TextRole | None) -> Iterator[_Probe]:
        """Yields texts of exactly as many tokens as a role reads, of one more, one less, and many more."""
        rules = self._model.rules(role)
        limit = self._limit if rules.max_tokens is None else min(self._limit, rules.max_tokens)
        word = self._word()
        if word is None:
            return
        around = self._tokenizer.single.special_tokens + rules.num_fixed_ids
        around += len(self._tokenizer.encode([rules.before], "text")[0]) if rules.before else 0
        for words in (limit - around - 1, limit - around, limit - around + 1, limit + limit // 4 + 8):
            if words > 0:
                yield f"{words} words", " ".join([word] * words)

    def _long_pairs(self) -> Iterator[tuple[str, str, str]]:
        """Yields pairs of just as many tokens as are read, one more, and with long texts."""
        word = self._word()
        if word is None:
            return
        limit = self._limit
        try:
            around = len(self._ours.together(word, [word])) - 2
        except InvalidRequestError:
            return
        room = limit - around
        sizes = [(3, room - 4), (3, room - 3), (3, room - 2), (3, limit + 8)]
        # A template truncates the document, not the query.
        if self._model.pairs.template is None:
            half = room // 2
            sizes += [(limit + 8, 3), (room, room), (half, half + 2), (half + 2, half), (half + 2, half - 2)]
        for first, second in sizes:
            if first > 0 and second > 0:
                texts = " ".join([word] * first), " ".join([word] * second)
                yield (f"{first} and {second} words", *texts)

    def _word(self) -> str | None:
        """Returns a word that is one token wherever it is repeated."""
        for word in _WORDS:
            few, more = self._tokenizer.encode([" ".join([word] * 8), " ".join([word] * 16)], "text")
            if len(few) == 8 and len(more) == 16:
                return word
        return None


class _Preprocessed:
    """Reads single texts and pairs with the processors of requests."""

    def __init__(self, model: LoadedModel, tokenizer: TextTokenizer, longest: int) -> None:
        self._model = model
        limits = LengthLimits(longest, window_overlap=0, side=model.truncation_side)
        self._processors = Processors(ProcessorContext(model, tokenizer, limits))
        self._ids = RequestIds(0, count(), most_tokens=1 << 40)

    def text(
        self, text: str, role: TextRole | None, instruction: str | None = None, prompt_name: str | None = None
    ) -> AnyTokens:
        """Returns a query or document as scored, or a text as embedded."""
        if role is None:
            task: Any = self._model.score_task
            request = EmbedRequest(texts=(text,), task=task, prompt_name=prompt_name, truncation=CUT_LONG)
            of_tokens = task == TOKEN_CLASSIFY
            processor = self._processors.token_classification if of_tokens else self._processors.embedding
            (sequence,) = processor.prepare(request, self._ids).sequences
            return sequence.payload.tokens
        query, document = (text, _DOCUMENT) if role == "query" else (_QUERY, text)
        wanted = Role.QUERY if role == "query" else Role.DOCUMENT
        sequences = self._score(query, [document], instruction)
        return next(each.payload.tokens for each in sequences if each.payload.role is wanted)

    def together(self, query: str, documents: Sequence[str], instruction: str | None = None) -> AnyTokens:
        """Returns a pair, or the first block of documents that are ranked together."""
        return self._score(query, documents, instruction)[0].payload.tokens

    def _score(self, query: str, documents: Sequence[str], instruction: str | None) -> list[TokenSequence]:
        request = ScoreRequest(
            queries=(query,), documents=tuple(documents), truncation=CUT_LONG, instruction=instruction
        )
        return self._processors.scores.prepare(request, self._ids).sequences


def probe_sequences(model: LoadedModel, tokenizer: TextTokenizer) -> tuple[TokenSequence, ...]:
    """Returns short sequences for the self-check of execution, some with special tokens in their texts."""
    ours = _Preprocessed(model, tokenizer, min(model.max_tokens, _LONGEST_SAMPLE))
    specials = _special_tokens(model)
    mixed = " ".join(f"{token} {word}" for token, word in zip(specials, _QUERY.split() * 3, strict=False))
    ending = "".join(["Zürich ", *specials])
    wanted: list[Callable[[], AnyTokens]]
    if model.listwise is not None:
        wanted = [partial(ours.together, _QUERY, [mixed, ending, ""])]
    elif model.score_task == TOKEN_CLASSIFY:
        wanted = [partial(ours.text, text, None) for text in (mixed, ending, "a")]
    elif model.reads_pairs:
        wanted = [partial(ours.together, "opened?", [ending])]
        if model.pairs.template is None:
            wanted = [partial(ours.together, mixed, ["a file"]), *wanted, partial(ours.text, ending, None)]
    else:
        wanted = [partial(ours.text, mixed, "query"), partial(ours.text, ending, "document")]
        wanted.append(partial(ours.text, "a", None))
    sequences = []
    for make in wanted:
        try:
            tokens = make()
        except InvalidRequestError as error:
            log.debug("a text of the self-check is refused: %s", error)
            continue
        if isinstance(tokens, JoinedTokens):
            tokens = Tokens(tokens.ids, tokens.type_ids)
        sequences.append(TokenSequence.text(0, ResultSlot(0, 0), model.score_task, tokens))
    return tuple(sequences)


def _short_probes(model: LoadedModel) -> list[_Probe]:
    umlauts = "Zürich grüßt: ÄÖÜ, naïve café"
    letters = " ".join("abcdefghijklmnopqrstuvwxyz")
    probes: list[_Probe] = [
        ("a short text", _QUERY),
        ("a sentence", _DOCUMENT),
        ("an empty text", ""),
        ("blanks around", "  two words \n"),
        ("upper case", "HOW Is A FILE OPENED?"),
        ("composed umlauts", unicodedata.normalize("NFC", umlauts)),
        ("decomposed umlauts", unicodedata.normalize("NFD", umlauts)),
        ("emoji with joiners", "done 👩‍💻 👨‍👩‍👧‍👦 ✅️!"),
        ("right to left", "שלום עולם، مرحبا بالعالم ٣٤"),
        ("digits", "12.5 + 2,100,000 = 1e6; 0x1F 2024-11-27"),
        ("a long word", "Donaudampfschifffahrtsgesellschaft" * 4),
        ("single letters", f"{letters} {letters.upper()}"),
        ("letters that are rare", "ſ ꙮ 𐍈 ᚠ Ŋ 東京 ﬁ ½ €"),
        ("lines", "one\n\ntwo\r\n\tthree "),
    ]
    specials = _special_tokens(model)
    for token in specials:
        probes.append((f"the token {token} in it", f"{token} a file{token}opened {token} now"))
        probes.append((f"the token {token} at its end", f"a file {token}"))
    added = model.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    rows = model.token_rows
    others = [added[each].content for each in sorted(added) if rows is None or each < rows]
    others = [token for token in others if token not in specials and token != _picture_token(model)]
    if others:
        probes.append(("added tokens", " a ".join(others[:_ADDED])))
    if _picture_token(model):
        probes.append(("the token of pictures", f"a {_picture_token(model)} b"))
    return probes


def _special_tokens(model: LoadedModel) -> list[str]:
    """Returns the first special tokens that texts may have."""
    backend = model.tokenizer.backend_tokenizer
    rows = model.token_rows
    ids = [each for each in model.tokenizer.all_special_ids if rows is None or each < rows]
    tokens = [backend.id_to_token(each) for each in dict.fromkeys(ids)]
    return [token for token in tokens if token and token != _picture_token(model)][:_SPECIAL]


def _picture_token(model: LoadedModel) -> str:
    return "" if model.vision is None else model.vision.image_token


def _limit_of(model: LoadedModel, config: EngineConfig) -> int:
    """Returns the most tokens that the library may read: the model's positions and the options limit it."""
    settings = model.backbone.config
    limits = [int(model.tokenizer.model_max_length)]
    positions = getattr(settings, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - model.position_offset)
    if config.max_model_len is not None:
        limits.append(config.max_model_len)
    if getattr(settings, "attention_type", None) == "block_sparse":
        limits.append(model.max_tokens)
    limit = min(limits)
    return limit if 0 < limit < _NO_LIMIT else _DEFAULT_LIMIT
