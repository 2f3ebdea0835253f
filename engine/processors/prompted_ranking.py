"""Ranking by a language model that chooses among letters. Nothing is generated.

Listwise: a prompt shows a window of documents, each behind a letter, and the probabilities of the letters as
the next token order them (FIRST: Gangi Reddy et al. 2024, arXiv 2406.15657). Windows slide from the last
documents to the first, as in RankGPT (Sun et al. 2023, arXiv 2304.09542).

Pairwise: a prompt shows two documents, and each pair is shown in both orders. A document's score is the mean
probability of its letter (PRP-Allpair: Qin et al. 2023, arXiv 2306.17563)."""

from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors.processor import PlanValues, ScorePlan, Scores
from maxsimd.engine.processors.text.builder import InputName, LongInputs
from maxsimd.engine.processors.text.tokenization import TextTokenizer, truncate
from maxsimd.engine.requests import LabelRequest, ScoreRequest, Usage
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler.sequence import TokenIds

RankBy = Literal["listwise", "pairwise"]

LETTERS = "ABCDEFGHIJKLMNOPQRST"
# Documents of a window, and how far the next window is from it.
WINDOW, STEP = len(LETTERS), len(LETTERS) // 2
# The most documents that are compared in pairs: they make so many prompts times as many.
MOST_IN_PAIRS = 50
# A window has fewer documents before each has fewer tokens than this.
_FEWEST_TOKENS = 32
_TASK = "Find the passage that answers the query best."
_QUESTION = "Which passage is it? Answer with its letter alone."
# A placeholder from Unicode's private use area.
_PLACE = "\ue0a0"

# The documents that each prompt of a round shows, in order.
Round: TypeAlias = list[list[int]]
# The probabilities [prompts, documents] of a round.
Chosen: TypeAlias = NDArray[np.float32]
# Yields rounds, is sent what was chosen in each, and returns a score for each document.
Ranking: TypeAlias = Generator[Round, Chosen, Scores]


def listwise(count: int, window: int, step: int) -> Ranking:
    """Orders documents by windows. A score is the share of the documents that are ranked no better."""
    order = np.arange(count)
    stop = count
    while count > 1:
        start = max(0, stop - window)
        (chosen,) = yield [order[start:stop].tolist()]
        order[start:stop] = order[start:stop][np.argsort(-chosen[: stop - start], kind="stable")]
        if start == 0:
            break
        stop -= step
    scores = np.empty(count, dtype=np.float32)
    scores[order] = np.arange(count, 0, -1, dtype=np.float32) / count
    return scores


def pairwise(count: int) -> Ranking:
    """Compares each document with each other."""
    if count == 1:
        return np.ones(1, dtype=np.float32)
    pairs = [[first, second] for first in range(count) for second in range(count) if first != second]
    chosen = yield pairs
    scores = np.zeros(count, dtype=np.float64)
    np.add.at(scores, np.array(pairs), chosen[:, :2])
    return (scores / (2 * (count - 1))).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PromptForm:
    """The tokens `before` and `after` the text of a prompt, and those of the `letters` as the next token."""

    before: TokenIds
    after: TokenIds
    letters: tuple[int, ...]

    @classmethod
    def of(cls, library_tokenizer: Any, tokenizer: TextTokenizer) -> Self:
        """By the checkpoint's chat template, if it has one that takes a message. Raises InvalidRequestError
        if letters are not tokens."""
        before, after = _around(library_tokenizer)
        (leading,) = tokenizer.encode([before], "prompt")
        if not before:
            leading = tokenizer.single.ids[0]
        # A bracket makes the letter a token of its own.
        for opening in ("[", ""):
            (ids,) = tokenizer.encode([after + opening], "prompt")
            longer = tokenizer.encode([after + opening + letter for letter in LETTERS], "prompt")
            letters = tuple(int(each[-1]) for each in longer if np.array_equal(each[:-1], ids))
            if len({*letters}) == len(LETTERS):
                return cls(leading, ids, letters)
        raise InvalidRequestError(
            "this model cannot rank documents: its tokenizer has no tokens for letters behind a prompt; ask "
            "for label scores (POST /v1/label-scores)",
            "model",
        )


def _around(tokenizer: Any) -> tuple[str, str]:
    """The text that the chat template writes around a message, up to where the answer begins."""
    if getattr(tokenizer, "chat_template", None):
        try:
            written: str = tokenizer.apply_chat_template(
                [{"role": "user", "content": _PLACE}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
        except Exception:  # the template takes other messages
            written = ""
        before, found, after = written.partition(_PLACE)
        if found:
            return before, after
    return "", "\nAnswer: "


@dataclass(frozen=True, slots=True, eq=False)
class RankingPrompts:
    """The prompts of one request: the part before the documents, which all prompts share, the documents'
    tokens, and the part behind them. A prompt shows at most `window` documents."""

    form: PromptForm
    head: TokenIds
    documents: list[TokenIds]
    marks: list[TokenIds]
    tail: TokenIds
    window: int
    truncated: int

    @classmethod
    def of(
        cls, form: PromptForm, tokenizer: TextTokenizer, request: ScoreRequest, long_inputs: LongInputs
    ) -> Self:
        """Truncates documents so that the `WINDOW` longest fit into one prompt, or fewer if they would have
        very few tokens. Raises InvalidRequestError for documents that may not be truncated, and for a query
        that leaves no room."""
        (query,) = tokenizer.encode((f" {text}" for text in request.query_texts), "queries")
        query = long_inputs.within(query, InputName("queries", 0)).tokens
        task = f"{request.instruction or _TASK}\n\nQuery:"
        before, after, question = tokenizer.encode([task, "\n\n", _QUESTION], "instruction")
        head = np.concatenate([form.before, before, query, after])
        tail = np.concatenate([question, form.after])
        marks = tokenizer.encode([f"[{letter}]" for letter in LETTERS], "prompt")
        around = max(map(len, marks)) + len(after)
        room = long_inputs.limit - len(head) - len(tail)
        names = [InputName("documents", i) for i in range(len(request.documents))]
        window = min(WINDOW, len(names), room // (_FEWEST_TOKENS + around))
        if window < min(2, len(names)):
            raise InvalidRequestError(
                f"the query and the instruction leave room for {max(0, room)} tokens of documents, and two "
                f"need {2 * (_FEWEST_TOKENS + around)}; shorten them",
                "queries",
            )
        texts = (f" {text}" for text in request.document_texts)
        encoded = tokenizer.encode(texts, "documents", room + 1, long_inputs.side, names)
        read = [long_inputs.within(*each) for each in zip(encoded, names, strict=True)]
        longest = _longest([len(each.tokens) for each in read], window, room - window * around)
        documents, truncated = [], 0
        for fitted, name in zip(read, names, strict=True):
            yield_to_smaller()
            if len(fitted.tokens) > longest and not long_inputs.may_truncate:
                raise name.error(
                    f"has more than the {longest} tokens that a prompt with {window} documents has room for; "
                    f"shorten it, or let it be truncated ({long_inputs.names.allow})"
                )
            tokens = truncate(fitted.tokens, min(longest, len(fitted.tokens)), long_inputs.side)
            truncated += fitted.truncated or len(tokens) < len(fitted.tokens)
            documents.append(np.concatenate([tokens, after]))
        return cls(form, head, documents, marks, tail, window, truncated)

    def request_of(self, shown: Sequence[Sequence[int]]) -> LabelRequest:
        """The prompts that show these documents."""
        return LabelRequest(self.head, tuple(map(self._shown, shown)))

    def _shown(self, documents: Sequence[int]) -> TokenIds:
        yield_to_smaller()
        pairs = zip(self.marks, documents, strict=False)
        parts = [part for mark, document in pairs for part in (mark, self.documents[document])]
        return np.concatenate([*parts, self.tail])

    def ranking(self, rank_by: RankBy, most_tokens: int) -> Ranking:
        """Raises RequestTooLargeError for prompts that would have more than `most_tokens` together."""
        count = len(self.documents)
        tokens = sum(map(len, self.documents))
        around = len(self.head) + len(self.tail)
        if rank_by == "pairwise":
            if count > MOST_IN_PAIRS:
                raise RequestTooLargeError(
                    f"{count} documents would make {count * (count - 1)} prompts, and at most "
                    f"{MOST_IN_PAIRS} documents are compared in pairs; send fewer, or have the model rank "
                    "listwise"
                )
            needed = 2 * (count - 1) * tokens + count * (count - 1) * around
        else:
            needed = 2 * tokens + (count // max(1, self.step) + 1) * around
        if needed > most_tokens:
            raise RequestTooLargeError(
                f"the prompts that rank these documents have some {needed} tokens, and a request may have "
                f"{most_tokens}; send fewer documents, or raise max_request_tokens"
            )
        return pairwise(count) if rank_by == "pairwise" else listwise(count, self.window, self.step)

    @property
    def step(self) -> int:
        return max(1, min(STEP, self.window // 2))

    def num_rounds(self, rank_by: RankBy) -> int:
        beyond = 0 if rank_by == "pairwise" else max(0, len(self.documents) - self.window)
        return 1 + -(-beyond // self.step)


def _longest(lengths: Sequence[int], window: int, room: int) -> int:
    """The length to which documents are truncated, so that the `window` longest have `room` together."""
    left = room
    longest = sorted(lengths)[-window:]
    for i, length in enumerate(longest):
        share = left // (len(longest) - i)
        if length > share:
            return share
        left -= length
    return max(longest)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankedPlan(ScorePlan):
    """A request whose documents have been ranked already."""

    ranked: Scores
    used: Usage

    @property
    def usage(self) -> Usage:
        return self.used

    def raw_scores(self, values: PlanValues) -> Scores:
        return self.ranked

    def final_scores(self, raw: Scores) -> Scores:
        return raw

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        return ()

    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        return {}
