"""The price of scoring, in tokens: how many the model could run in the same time."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from maxsimd.engine.checkpoint import LoadedModel

# An estimate for a small model (MiniLM-L6): scoring this many cached rows against a usual query, or handling
# this many cached documents, takes as long as running a token. It is not measured on the machine at hand.
ROWS_PER_TOKEN, DOCUMENTS_PER_TOKEN = 128, 4

# The multiply-adds of a token in the layers of MiniLM-L6. The least for all models: smaller ones take longer
# than theirs suggest.
_LEAST_MULTIPLY_ADDS = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
# Comparing two rows takes as long as their multiply-adds and this many more, for maxima and moving numbers:
# between 60 and 370 in plain torch for queries of 256 to 6,000 rows and 16 to 384 dimensions, by the time of
# a core, relative to the layers' products on the same core.
_MORE_A_COMPARISON = 256
# Explaining a score costs this many times as much again: plain torch finds the matches in float32, with the
# position of each maximum.
EXPLAINED = 3


@dataclass(frozen=True, slots=True)
class ScoringPrice:
    """The price of MaxSim in tokens, by query rows x document rows.

    `ROWS_PER_TOKEN` rows of a document cost one token if the query has at most `usual_query_rows`: reading
    them takes most of the time. The price of longer queries grows in proportion to their rows."""

    usual_query_rows: float

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """By the dimensions of a model's vectors, and the multiply-adds of a token in its layers."""
        task = model.tasks.get(model.score_task)
        compared = (1 if task is None else task.dim) + _MORE_A_COMPARISON
        config = getattr(model.backbone, "config", None)
        return cls(max(_LEAST_MULTIPLY_ADDS, _multiply_adds(config)) / compared / ROWS_PER_TOKEN)

    def rows(self, query_rows: int, document_rows: int, times: int = 1) -> float:
        """Returns how many rows, compared with a usual query, cost the same as `document_rows` compared with
        this query. `times` multiplies the query's rows, for explained scores."""
        return document_rows * max(1.0, times * query_rows / self.usual_query_rows)

    def parts(self, query_rows: int, document_rows: int, most: int, times: int = 1) -> int:
        """Returns how many parts to divide a query into, so that a document's rows count as about `most` for
        each part. No part is smaller than a usual query: smaller ones would cost the same."""
        wanted = ceil(self.rows(query_rows, document_rows, times) / most)
        return max(1, min(wanted, query_rows, int(times * query_rows / self.usual_query_rows)))

    def tokens(self, rows: float, documents: int) -> int:
        """The price of that many `rows`, of some cached documents; at least 1."""
        return max(1, ceil(rows / ROWS_PER_TOKEN + documents / DOCUMENTS_PER_TOKEN))

    def extra_tokens(self, query_rows: int, document_rows: int, times: int = 1) -> int:
        """Returns the extra price of scoring a document in the step that runs it. The price of its tokens
        includes its score for a usual query."""
        return int((self.rows(query_rows, document_rows, times) - document_rows) / ROWS_PER_TOKEN)


def _multiply_adds(config: Any) -> int:
    """Of one token in the linear layers of a backbone, by its configuration; 0 where that does not tell."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers, inner = (
        _size(text, name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size")
    )
    return layers * (4 * hidden * hidden + 2 * hidden * (inner or 4 * hidden))


def _size(config: Any, name: str) -> int:
    """A number of a configuration, or the mean of those for each layer; 0 where it has none."""
    try:
        value = getattr(config, name, None) or 0
        return int(sum(value) / len(value)) if isinstance(value, list | tuple) else int(value)
    except Exception:  # configurations of transformers raise errors of their own
        return 0
