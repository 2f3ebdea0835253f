"""vLLM's CPU build reads the same folders and gives the same, where tests/parity/second_readers.py says so.

It has an environment of its own: name its interpreter by MAXSIMD_VLLM (`maxsimd bench peers --help` says how
to make it), and run this by `make test-oracles`. Token ids are ours, so that prompts and markers, which vLLM
leaves out, are there; what is compared is what the two make of the files."""

import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.processors.processor import Plan, ProcessorContext, RequestIds
from maxsimd.engine.processors.registry import Processors
from maxsimd.engine.processors.text.builder import LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import EmbedRequest, InputType, ScoreRequest
from maxsimd.pooling.sparse import WordsHead
from maxsimd.scheduler import TokenSequence
from tests.checkpoints import cross_encoders, language_models, late_interaction, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.families import Family
from tests.parity.models_page import PAGE_FAMILIES
from tests.parity.second_readers import READERS, VERSION, Compared, Equal, Told

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("MAXSIMD_ORACLES" not in os.environ, reason="run by make test-oracles"),
]

BOUND = 1e-4
# Folders of their own, where vLLM takes for granted what is so of the published one: the ids of its markers,
# heads of 32 dimensions or more, embeddings as wide as states, and an output matrix in the file.
BUILDS: dict[str, Callable[[Path], str]] = {
    "ELECTRA": partial(cross_encoders.electra, embedding=128),
    "jina-reranker-v3": language_models.jina_reranker_v3_with_published_ids,
    "ColBERT": partial(late_interaction.stanford, heads=2),
    "ColBERT, attended expansion": partial(late_interaction.stanford, attend=True, heads=2),
    "answerai-colbert-small": partial(late_interaction.stanford, dim=96, heads=2),
    "native multi-vector": partial(late_interaction.native, heads=2),
    "SPLADE": partial(sparse_encoders.splade, decoder=True),
    "SPLADE, plain": partial(sparse_encoders.plain, decoder=True),
    "SPLADE, heaviest words": partial(sparse_encoders.splade_heaviest, decoder=True),
}

Numbers = NDArray[np.float32]

_SIDE = Path(__file__).with_name("vllm_side.py")
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
_TASKS: dict[Compared, str] = {
    "embeddings": "embed", "tokens": "token_embed", "logits": "classify", "words": "embed",
    "own words": "token_classify", "listwise": "token_embed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Input:
    """A text or pair by its token ids, with the start of a `second` text, and which `rows` of vLLM's are
    ours. Of `texts`, documents and their query, vLLM makes the prompt itself."""

    ids: list[int]
    second: int | None
    rows: list[int]
    texts: list[str] | None = None

    @classmethod
    def of(cls, sequence: TokenSequence, takes_types: bool) -> "Input":
        tokens = sequence.payload.tokens
        types = tokens.type_ids if takes_types else None
        second = None if types is None or not np.any(types) else int(np.argmax(types))
        rows = tokens.pooled_positions
        rows = np.arange(len(tokens)) if rows is None else rows
        # vLLM knows nothing of tokens that are not attended to: all that attend are before them.
        within = [int(row) for row in rows if row < tokens.num_attended]
        return cls(tokens.ids[: tokens.num_attended].tolist(), second, within)


class Vllm:
    """A process that has imported vLLM, and forks one for each order."""

    def __init__(self, python: str, folder: Path) -> None:
        self._folder, self._numbers = folder, count()
        with (folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(_SIDE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | _ENVIRONMENT,
            )  # fmt: skip
        self.version = self._line().strip()

    def run(
        self, checkpoint: str, compared: Compared, told: Told, inputs: list[Input], activation: bool
    ) -> list[Numbers]:
        output = self._folder / f"{next(self._numbers)}.npz"
        asked = [{"ids": each.ids, "second": each.second, "texts": each.texts} for each in inputs]
        order = {
            "checkpoint": checkpoint, "task": _TASKS[compared], "overrides": dict(told.overrides),
            "stand_in": told.stand_in, "pooler": dict(told.pooler), "inputs": asked,
            "activation": activation, "output": str(output),
        }  # fmt: skip
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = json.loads(self._line())
        assert answer is None, answer
        with np.load(output) as found:
            return [found[str(i)] for i in range(len(inputs))]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "vLLM's process has ended"
        return line


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    if "MAXSIMD_VLLM" not in os.environ:
        pytest.skip("MAXSIMD_VLLM names no interpreter")
    started = Vllm(os.environ["MAXSIMD_VLLM"], tmp_path_factory.mktemp("vllm"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def texts(pairs: list[Pair]) -> tuple[list[str], list[str]]:
    """Ten texts, or five pairs, of one word up to more than a model reads."""
    queries = ["a", *(pair.query for pair in pairs[:3]), " ".join(pair.query for pair in pairs[3:9])]
    documents = ["b", *(pair.document for pair in pairs[:3]), " ".join(pair.document for pair in pairs[3:40])]
    return queries, documents


@dataclass(frozen=True, slots=True)
class Asked:
    """Inputs for vLLM, our results, what of vLLM's arrays they are, and whether vectors are normalized."""

    inputs: list[Input]
    ours: list[Numbers]
    taken: Callable[[Input, Numbers], Numbers]
    activation: bool


def _inputs(engine: Engine, request: EmbedRequest | ScoreRequest) -> list[Input]:
    """The sequences that the engine runs for a request, in the order of its results."""
    model = engine.model
    limits = LengthLimits(model.max_tokens, window_overlap=0, side=model.truncation_side)
    made = Processors(ProcessorContext(model, TextTokenizer(model.tokenizer), limits))
    ids = RequestIds(0, count(), 1_000_000)
    plan: Plan
    if isinstance(request, ScoreRequest):
        plan = made.scores.prepare(request, ids)
    else:
        texts = made.classification if request.task == "classify" else made.embedding
        plan = texts.prepare(request, ids)
    sequences = {each.payload.slot.index: each for each in plan.sequences if each.payload.slot is not None}
    return [Input.of(sequences[i], model.takes_type_ids) for i in range(len(sequences))]


async def _by_role(engine: Engine, queries: list[str], documents: list[str], task: Any, embed: Any) -> Any:
    """The sequences that the engine runs for queries and documents, and its results."""
    inputs, made = [], []
    roles: list[tuple[InputType, list[str]]] = [("query", queries), ("document", documents)]
    for role, texts in roles:
        request = EmbedRequest(texts=tuple(texts), task=task, input_type=role, truncation=CUT_LONG)
        inputs += _inputs(engine, request)
        made += list((await embed(texts, input_type=role, truncation=CUT_LONG)).embeddings)
    return inputs, made


async def _embeddings(engine: Engine, queries: list[str], documents: list[str]) -> Asked:
    inputs, ours = await _by_role(engine, queries, documents, "embed", engine.embed)
    return Asked(inputs, ours, lambda _, theirs: theirs, engine.model.tasks["embed"].normalized)


async def _tokens(engine: Engine, queries: list[str], documents: list[str]) -> Asked:
    inputs, made = await _by_role(engine, queries, documents, "token_embed", engine.embed_tokens)
    # Behind those that vLLM is asked for are tokens that are not attended to.
    ours = [rows[: len(asked.rows)] for asked, rows in zip(inputs, made, strict=True)]

    def of_rows(asked: Input, theirs: Numbers) -> Numbers:
        """vLLM gives no vector of bge-m3's first token."""
        return theirs[np.array(asked.rows) - (len(asked.ids) - len(theirs))]

    return Asked(inputs, ours, of_rows, engine.model.tasks["token_embed"].normalized)


async def _logits(engine: Engine, queries: list[str], documents: list[str]) -> Asked:
    request = ScoreRequest(queries=tuple(queries), documents=tuple(documents), truncation=CUT_LONG)
    result = await engine.score(queries, documents, use_activation=False, truncation=CUT_LONG, cache="bypass")
    ours = [np.array([score], np.float32) for score in result.scores]
    return Asked(_inputs(engine, request), ours, lambda _, theirs: theirs, activation=False)


async def _words(engine: Engine, queries: list[str], documents: list[str]) -> Asked:
    head = engine.model.tasks["sparse_embed"].head
    assert isinstance(head, WordsHead)

    def heaviest(_: Input, theirs: Numbers) -> Numbers:
        """vLLM gives all weights, whatever a checkpoint says of how many count."""
        most = len(theirs) if head.most is None else head.most
        return np.where(theirs >= np.sort(theirs)[-most], theirs, np.float32(0))

    return await _sparse(engine, queries, documents, heaviest)


async def _own_words(engine: Engine, queries: list[str], documents: list[str]) -> Asked:
    size = len(engine.model.tokenizer)

    def by_word(asked: Input, theirs: Numbers) -> Numbers:
        """vLLM gives no weights of the first and last token."""
        weights = np.zeros(size, np.float32)
        np.maximum.at(weights, asked.ids[1:-1], theirs.reshape(-1))
        return weights

    return await _sparse(engine, queries, documents, by_word)


async def _sparse(engine: Engine, queries: list[str], documents: list[str], weights: Any) -> Asked:
    inputs, vectors = await _by_role(engine, queries, documents, "sparse_embed", engine.embed_sparse)
    ours = []
    for vector in vectors:
        words = np.zeros(len(engine.model.tokenizer), np.float32)
        words[vector.indices] = vector.values
        ours.append(words)
    return Asked(inputs, ours, weights, activation=True)


async def _listwise(engine: Engine, queries: list[str], documents: list[str]) -> Asked:
    """vLLM writes the prompt itself, and cuts no document: the longest is left out."""
    query, ranked = queries[1], [*documents[:-1], *queries]
    scores = (await engine.score(query, ranked, truncation=CUT_LONG)).scores

    def cosines(_: Input, theirs: Numbers) -> Numbers:
        """vLLM gives the vectors of the documents' markers, then that of the query's."""
        vectors = theirs / np.linalg.norm(theirs, axis=1, keepdims=True)
        return vectors[:-1] @ vectors[-1]

    asked = Input([], None, [], [*ranked, query])
    return Asked([asked], [np.array(scores, np.float32)], cosines, activation=False)


_ASK: dict[Compared, Callable[[Engine, list[str], list[str]], Awaitable[Asked]]] = {
    "embeddings": _embeddings, "tokens": _tokens, "logits": _logits, "words": _words, "own words": _own_words,
    "listwise": _listwise,
}  # fmt: skip


def relative_error(ours: list[Numbers], theirs: list[Numbers]) -> float:
    """The largest difference by the largest number of its array; infinite where they differ in shape."""
    if all(each.size == 1 for each in ours):  # logits, any of which may be next to 0
        ours, theirs = [np.concatenate(ours)], [np.concatenate(theirs)]
    errors = []
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape:
            return float("inf")
        errors.append(np.abs(mine - other).max() / np.abs(mine).max())
    return float(np.max(errors))


@pytest.mark.parametrize(
    "family",
    [each for each in PAGE_FAMILIES if isinstance(READERS[each.name], Equal)],
    ids=lambda family: f"{family.kind}: {family.name}",
)
async def test_vllm_makes_the_same_of_a_folder(
    family: Family, checkpoints: SharedCheckpoints, engines: Engines, vllm: Vllm, texts: Any
) -> None:
    reader = READERS[family.name]
    assert isinstance(reader, Equal)
    path = checkpoints(BUILDS.get(family.name, family.build))
    engine = await engines(EngineConfig(model=path, dtype="float32", **family.settings))
    asked = await _ASK[reader.compared](engine, *texts)
    found = vllm.run(path, reader.compared, reader.told, asked.inputs, asked.activation)
    theirs = [asked.taken(*each) for each in zip(asked.inputs, found, strict=True)]
    error = relative_error(asked.ours, theirs)
    print(f"{family.name}: relative error {error:.1e}")
    assert error <= BOUND


def test_the_table_is_about_this_version(vllm: Vllm) -> None:
    assert vllm.version == VERSION, "try each family again, and change the table"
