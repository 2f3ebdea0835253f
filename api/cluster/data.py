"""Scoring and embedding the rows of a data set of Ray Data, in a pool of actors that each have an engine.

Importing this module loads neither Ray nor torch; `ray` is needed once a data set is there to be scored."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from maxsimd.api.cluster.actor_pool import ActorPool, with_threads
from maxsimd.api.cluster.row_engine import RowEngine
from maxsimd.api.cluster.rows import ScoreRow
from maxsimd.engine import EngineConfig

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

Row: TypeAlias = dict[str, Any]
OnRow: TypeAlias = Callable[[Row], Row]

_SCORE_OPTIONS = frozenset({"truncation", "use_activation", "normalize", "instruction"})
_EMBED_OPTIONS = frozenset({"input_type", "prompt_name", "dimensions", "truncation"})


class ScoreRows:
    """Scores the rows of a table, for `Dataset.map_batches` with `batch_format="pyarrow"` in an actor pool;
    `build_scorer` sets that up. Calls may come from several threads.

    A row has the columns `query` and either `documents`, a list of texts, or `document`, one text. Added are
    `scores` (a list of float64, null for documents that have none) or `score`, `error` (null, or why scores
    are missing) and `prompt_tokens`. All other columns are carried through, in the same order of rows;
    columns with the names of those that are added are replaced.
    """

    def __init__(self, config: EngineConfig | None = None, query: str | None = None, **options: Any) -> None:
        """Loads the model. `query` is the one of all rows, where they have no such column. `options` are
        those of `Engine.score`: `truncation`, `use_activation`, `normalize` and `instruction`. Raises
        ModelLoadError, TypeError for other options, and InvalidRequestError for those that the model does not
        take."""
        _check_options(options, _SCORE_OPTIONS)
        self._query = query
        self._options = options
        self._engine = RowEngine(config or EngineConfig())
        self._engine.check("score", options)

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """Raises ValueError where the table lacks columns, and TypeError for what is no table."""
        names = _columns(table, ("query",) if self._query is None else ())
        if not {"documents", "document"} & names:
            raise ValueError(f"rows have neither documents nor document, but {', '.join(sorted(names))}")
        used = table.select([name for name in ("query", "documents", "document") if name in names])
        return with_columns(table, added_columns(table), self.score(self.read(used.to_pylist())))

    def read(self, rows: list[Row]) -> list[ScoreRow]:
        """Rows from their columns."""
        return [ScoreRow.of(row, self._query) for row in rows]

    def score(self, rows: list[ScoreRow]) -> list[Row]:
        """What is added to each row, in their order."""
        results = self._engine.score(rows, self._options)
        return [result.columns(row) for row, result in zip(rows, results, strict=True)]

    def close(self) -> None:
        """Frees the engine; an actor need not, as its process ends."""
        self._engine.close()


class EmbedRows:
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
        _check_options(options, _EMBED_OPTIONS)
        self._method = "embed" if task == "embed" else "embed_tokens"
        self._options = options
        self._engine = RowEngine(config or EngineConfig())
        self._engine.check(self._method, options)

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

    def close(self) -> None:
        """Frees the engine; an actor need not, as its process ends."""
        self._engine.close()


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
    config, cpus = with_threads(config or EngineConfig(), num_cpus)
    pool = ActorPool(replicas, cpus, num_gpus)
    arguments = {"config": config, "query": query, **options}

    def scored(rows: "Dataset") -> "Dataset":
        if preprocess is not None:
            rows = rows.map(_Adding(preprocess))
        # Blocks are what actors get as tasks, of which they work on two at a time.
        rows = rows.repartition(target_num_rows_per_block=batch_size)
        rows = pool.map_batches(rows, ScoreRows, arguments, batch_size)
        return rows if postprocess is None else rows.map(postprocess)

    return scored


class _Adding:
    """Adds to a row the columns that a function makes of it."""

    def __init__(self, function: OnRow) -> None:
        self._function = function

    def __call__(self, row: Row) -> Row:
        return {**row, **self._function(row)}


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
    """What scoring adds to a table: the types of pyarrow by the columns' names."""
    import pyarrow as pa

    rest = {"error": pa.string(), "prompt_tokens": pa.int64()}
    if "documents" in table.column_names:
        return {"scores": pa.list_(pa.float64()), **rest}
    return {"score": pa.float64(), **rest}


def with_columns(table: "pa.Table", types: Mapping[str, Any], rows: list[Row]) -> "pa.Table":
    """The table with these columns, of which `rows` has the values; columns with their names are replaced."""
    import pyarrow as pa

    table = table.drop_columns([name for name in types if name in table.column_names])
    for name, kind in types.items():
        table = table.append_column(name, pa.array([row[name] for row in rows], type=kind))
    return table
