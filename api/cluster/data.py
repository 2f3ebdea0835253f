"""Scoring and embedding the rows of a data set of Ray Data, in a pool of actors that each have an engine.

Importing this module loads neither Ray nor torch; `ray` is needed once a data set is there to be scored."""

import asyncio
import atexit
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from maxsimd.api.process import let_waiting_threads_sleep
from maxsimd.engine import (
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset


# Batches in an actor: while one is read or written, the other fills steps. As many wait.
_BATCHES_AT_A_TIME = 2
# Retries of a batch that ends its actor. Ray's default is unlimited.
_MAX_RETRIES = 3


@dataclass(frozen=True, slots=True)
class ActorPool:
    """`replicas` is the number of actors, or its minimum and maximum; each has `num_cpus` cores and
    `num_gpus`."""

    replicas: int | tuple[int, int]
    num_cpus: int
    num_gpus: float

    @property
    def most_cpus(self) -> int:
        return self.num_cpus * (self.replicas[1] if isinstance(self.replicas, tuple) else self.replicas)

    def map_batches(
        self, rows: "Dataset", actor: type, arguments: dict[str, Any], batch_size: int | None
    ) -> "Dataset":
        """Runs `actor`, made with these arguments, on tables of `batch_size` rows (None: whole blocks), from
        several threads. Actors that die are restarted."""
        from ray.data import ActorPoolStrategy

        least, most = self.replicas if isinstance(self.replicas, tuple) else (self.replicas, self.replicas)
        compute = ActorPoolStrategy(
            min_size=least,
            max_size=most,
            max_concurrent_calls_per_actor=_BATCHES_AT_A_TIME,
            max_tasks_in_flight_per_actor=2 * _BATCHES_AT_A_TIME,
            # Otherwise the second batch waits for the first.
            enable_true_multi_threading=True,
        )
        with warnings.catch_warnings():
            # Ray warns of arguments without a parameter, such as the number of retries.
            warnings.simplefilter("ignore", DeprecationWarning)
            return rows.map_batches(
                actor,
                compute=compute,
                batch_size=batch_size,
                batch_format="pyarrow",
                fn_constructor_kwargs=arguments,
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                max_restarts=-1,
                max_task_retries=_MAX_RETRIES,
            )


Row: TypeAlias = dict[str, Any]

# An error names at most this many documents.
_MOST_NAMED = 5
# A document as the engine's messages name it.
_DOCUMENT = re.compile(r"\bdocuments\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A query and documents of any types. A pair has one document and gets one score instead of a list."""

    query: Any
    documents: Any
    is_pair: bool

    @classmethod
    def of(cls, values: Mapping[str, Any], query: str | None) -> "ScoreRow":
        """From columns; `query` is the query of all rows, if there is one."""
        asked = values.get("query") if query is None else query
        if "documents" in values:
            return cls(asked, values["documents"], is_pair=False)
        if "document" in values:
            return cls(asked, [values["document"]], is_pair=True)
        return cls(asked, None, is_pair=False)

    @property
    def refusal(self) -> str | None:
        """Why no document can be scored, or None."""
        if not isinstance(self.query, str):
            return f"query is no text but {_kind(self.query)}"
        if self.documents is None:
            return "there are no documents"
        if not isinstance(self.documents, Sequence) or isinstance(self.documents, str | bytes):
            return f"documents is no list but {_kind(self.documents)}"
        return None

    def refused(self, reason: str) -> Row:
        """The added columns of a row without scores."""
        is_list = isinstance(self.documents, Sequence) and not isinstance(self.documents, str | bytes)
        return self._columns([None] * len(self.documents) if is_list else None, reason, 0)

    def scored(self, scores: Mapping[int, float], errors: Mapping[int, str], tokens: int) -> Row:
        """The added columns, from scores and errors by the documents' indexes."""
        error = None
        if errors and self.is_pair:
            error = f"document {errors[0]}" if errors[0].startswith("is no text") else errors[0]
        elif errors:
            named = [f"documents[{i}]: {errors[i]}" for i in sorted(errors)[:_MOST_NAMED]]
            more = len(errors) - len(named)
            error = "; ".join(named) + (f"; and {more} more" if more else "")
        return self._columns([scores.get(i) for i in range(len(self.documents))], error, tokens)

    def named(self, message: str, indexes: Sequence[int]) -> str:
        """The engine's message about the texts at `indexes`, with the row's own name of a document."""

        def own(found: re.Match[str]) -> str:
            return "document" if self.is_pair else f"documents[{indexes[int(found[1])]}]"

        return _DOCUMENT.sub(own, message, count=1)

    def _columns(self, scores: list[float | None] | None, error: str | None, tokens: int) -> Row:
        rest = {"error": error, "prompt_tokens": tokens}
        if self.is_pair:
            return {"score": None if scores is None else scores[0], **rest}
        return {"scores": scores, **rest}


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


T = TypeVar("T")

# float32 [dim] or [tokens, dim], or None; an error; the text's tokens.
Embedded: TypeAlias = tuple[NDArray[np.float32] | None, str | None, int]

# Errors of a single row.
ROW_ERRORS = (InvalidRequestError, RequestFailedError, RequestTimeoutError, RequestTooLargeError)
# Exit status of an actor whose engine has died.
_DEAD = 70


class RowEngine:
    """Owns an engine and its event loop's thread. Methods block, and may be called from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ModelLoadError."""
        self._process = os.getpid()
        let_waiting_threads_sleep()
        import uvloop

        from maxsimd.engine import Engine

        # Rows wait until the engine has room for them.
        self._engine = Engine(replace(config, max_wait_seconds=None))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="maxsimd-rows", daemon=True)
        self._thread.start()
        # A process whose threads still run may abort at its end.
        atexit.register(self.close)
        self._wait(self._engine.start())

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._process != os.getpid():  # a fork has none of the threads
            return
        self._wait(self._engine.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def check(self, method: str, options: dict[str, Any]) -> None:
        """Raises InvalidRequestError for options that the model does not take, before every row has that
        error."""
        texts = ("query", "document") if method == "score" else ("text",)
        self._wait(getattr(self._engine, method)(*texts, **options))

    def score(self, rows: Sequence[ScoreRow], options: dict[str, Any]) -> list[Row]:
        """The added columns of each row. Raises EngineDeadError; an actor of Ray ends instead, and Ray starts
        another."""
        return self._wait_for_all(self._score(row, options) for row in rows)

    def embed(self, texts: Sequence[Any], method: str, options: dict[str, Any]) -> list[Embedded]:
        """A result for each text. Raises as `score` does."""
        return self._wait_for_all(self._embed(text, method, options) for text in texts)

    async def _score(self, row: ScoreRow, options: dict[str, Any]) -> Row:
        if (refusal := row.refusal) is not None:
            return row.refused(refusal)
        texts = [each for each in row.documents if isinstance(each, str)]
        indexes = [i for i, each in enumerate(row.documents) if isinstance(each, str)]
        others = {i: each for i, each in enumerate(row.documents) if not isinstance(each, str)}
        errors = {i: f"is no text but {_kind(each)}" for i, each in others.items()}
        if not texts:
            return row.scored({}, errors, 0)
        # Some models score documents together: all or none.
        together = self._engine.model.score_type.scores_together
        reported: dict[str, Any] = {} if together else {"on_error": "report"}
        try:
            result = await self._engine.score(row.query, texts, priority="batch", **reported, **options)
        except ROW_ERRORS as error:
            return row.refused(row.named(str(error), indexes))
        for i, reason in result.errors.items():
            # A list of errors has the names before them.
            errors[indexes[i]] = row.named(reason, indexes).removeprefix(f"documents[{indexes[i]}] ")
        scores = {indexes[i]: score for i, score in enumerate(result.scores) if i not in result.errors}
        return row.scored(scores, errors, result.usage.prompt_tokens)

    async def _embed(self, text: Any, method: str, options: dict[str, Any]) -> Embedded:
        if not isinstance(text, str):
            return None, f"text is no text but {type(text).__name__}", 0
        try:
            result = await getattr(self._engine, method)([text], priority="batch", **options)
        except ROW_ERRORS as error:
            return None, str(error), 0
        return result.embeddings[0], None, result.usage.prompt_tokens

    def _wait_for_all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """All results in order; an error cancels the others. Ends an actor's process when its engine has
        died, since a failed device cannot be used again in it."""

        async def gather() -> list[T]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in work]
            return [task.result() for task in tasks]

        try:
            return self._wait(gather())
        except ExceptionGroup as errors:
            dead = errors.subgroup(EngineDeadError)
            error = (dead or errors).exceptions[0]
            if dead and _is_actor():
                print(f"maxsimd: {error}; the actor ends", file=sys.stderr, flush=True)
                os._exit(_DEAD)
            raise error from None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _is_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


OnRow: TypeAlias = Callable[[Row], Row]

_SCORE_OPTIONS = frozenset({"truncation", "use_activation", "normalize", "instruction"})
_EMBED_OPTIONS = frozenset({"input_type", "prompt_name", "dimensions", "truncation"})


class _Rows:
    """Owns an engine for one method. Calls may come from several threads."""

    def __init__(
        self, config: EngineConfig | None, method: str, options: Row, allowed: frozenset[str]
    ) -> None:
        _check_options(options, allowed)
        self._method = method
        self._options = options
        self._engine = RowEngine(config or EngineConfig())
        self._engine.check(method, options)

    def close(self) -> None:
        """Frees the engine. An actor need not."""
        self._engine.close()


class ScoreRows(_Rows):
    """Scores the rows of a table, for `Dataset.map_batches` with `batch_format="pyarrow"` in an actor pool;
    `build_scorer` sets that up. Calls may come from several threads.

    A row has the columns `query` and either `documents`, a list of texts, or `document`, one text. Added are
    `scores` (a list of float64, null for documents that have none) or `score`, `error` (null, or why scores
    are missing) and `prompt_tokens`. All other columns are carried through, in the same order of rows;
    columns with the names of those that are added are replaced.
    """

    def __init__(self, config: EngineConfig | None = None, query: str | None = None, **options: Any) -> None:
        """Loads the model. `query` is for all rows, if they have no such column. `options` are those of
        `Engine.score`: `truncation`, `use_activation`, `normalize` and `instruction`. Raises ModelLoadError,
        TypeError for other options, and InvalidRequestError for those that the model does not take."""
        self._query = query
        super().__init__(config, "score", options, _SCORE_OPTIONS)

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """Raises ValueError where the table lacks columns, and TypeError for what is no table."""
        names = _columns(table, ("query",) if self._query is None else ())
        if not {"documents", "document"} & names:
            raise ValueError(f"rows have neither documents nor document, but {', '.join(sorted(names))}")
        used = table.select([name for name in ("query", "documents", "document") if name in names])
        return with_columns(table, added_columns(table), self.score(used.to_pylist()))

    def score(self, rows: list[Row]) -> list[Row]:
        """The added columns of each row."""
        return self._engine.score([ScoreRow.of(row, self._query) for row in rows], self._options)


class EmbedRows(_Rows):
    """Embeds the column `text` of a table, as `ScoreRows` scores. Added are `embedding`, `error` and
    `prompt_tokens`; an embedding is a list of float32 [dim], or with `task="token_embed"` a list of lists
    [tokens, dim], and null where there is an error."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        task: Literal["embed", "token_embed"] = "embed",
        **options: Any,
    ) -> None:
        """Loads the model. `options` are those of `Engine.embed`: `input_type`, `prompt_name`, `dimensions`
        and `truncation`. Raises as `ScoreRows` does."""
        method = "embed" if task == "embed" else "embed_tokens"
        super().__init__(config, method, options, _EMBED_OPTIONS)

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """Raises ValueError where there is no column `text`, and TypeError for what is no table."""
        import pyarrow as pa

        _columns(table, ("text",))
        results = self._engine.embed(table["text"].to_pylist(), self._method, self._options)
        vector = pa.list_(pa.float32())
        kind = vector if self._method == "embed" else pa.list_(vector)
        added = {"embedding": kind, "error": pa.string(), "prompt_tokens": pa.int64()}
        columns = [
            {"embedding": None if rows is None else list(rows), "error": error, "prompt_tokens": tokens}
            for rows, error, tokens in results
        ]
        return with_columns(table, added, columns)


def build_scorer(
    config: EngineConfig | None = None,
    preprocess: OnRow | None = None,
    postprocess: OnRow | None = None,
    *,
    query: str | None = None,
    replicas: int | tuple[int, int] = 1,
    num_cpus: int | None = None,
    num_gpus: float = 0,
    batch_size: int = 512,
    **options: Any,
) -> "Callable[[Dataset], Dataset]":
    """A function that adds scores to the rows of a data set, as `ScoreRows` says.

    `preprocess` makes of a row the columns that scoring needs; the row's own columns are carried through.
    `postprocess` makes of a scored row the one that comes out. `replicas` is the number of actors, or the
    least and the most of them; each has `num_cpus` cores, one by default, and the engine as many threads, and
    `num_gpus` GPUs. `batch_size` is in rows, and what is scored again when an actor dies. `options` are those
    of `ScoreRows`. Raises ValueError where `config.threads` and `num_cpus` differ."""
    _check_options(options, _SCORE_OPTIONS)
    config = config or EngineConfig()
    if config.threads is not None and num_cpus is not None and config.threads != num_cpus:
        raise ValueError(f"threads={config.threads}, but num_cpus={num_cpus}; give one of them")
    cpus = num_cpus or config.threads or 1
    pool = ActorPool(replicas, cpus, num_gpus)
    # Ray limits OpenMP to the actor's cores.
    arguments = {"config": replace(config, threads=cpus), "query": query, **options}

    def scored(rows: "Dataset") -> "Dataset":
        if preprocess is not None:
            rows = rows.map(lambda row: {**row, **preprocess(row)})
        # A block is a task; an actor has two at a time.
        rows = rows.repartition(target_num_rows_per_block=batch_size)
        rows = pool.map_batches(rows, ScoreRows, arguments, batch_size)
        return rows if postprocess is None else rows.map(postprocess)

    return scored


def _check_options(options: Mapping[str, Any], allowed: frozenset[str]) -> None:
    if unknown := sorted(options.keys() - allowed):
        raise TypeError(f"there is no option {', '.join(unknown)}; there are {', '.join(sorted(allowed))}")


def _columns(table: "pa.Table", needed: tuple[str, ...]) -> set[str]:
    if not hasattr(table, "column_names"):
        raise TypeError(
            f'batches must be tables of pyarrow, not {type(table).__name__}: batch_format="pyarrow"'
        )
    names = set(table.column_names)
    if missing := [name for name in needed if name not in names]:
        raise ValueError(f"rows have no column {missing[0]}, but {', '.join(sorted(names))}")
    return names


def added_columns(table: "pa.Table") -> dict[str, Any]:
    """The added columns' types by name."""
    import pyarrow as pa

    rest = {"error": pa.string(), "prompt_tokens": pa.int64()}
    if "documents" in table.column_names:
        return {"scores": pa.list_(pa.float64()), **rest}
    return {"score": pa.float64(), **rest}


def with_columns(table: "pa.Table", types: Mapping[str, Any], rows: list[Row]) -> "pa.Table":
    """The table with these columns, in place of any with their names."""
    import pyarrow as pa

    table = table.drop_columns([name for name in types if name in table.column_names])
    for name, kind in types.items():
        table = table.append_column(name, pa.array([row[name] for row in rows], type=kind))
    return table
