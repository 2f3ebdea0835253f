"""The price of scoring, in tokens: how many the model could run in the same time."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from maxsimd.engine.checkpoint import LoadedModel

# An estimate for a small model (MiniLM-L6): scoring this many cached rows against a usual query, or handling
# this many cached documents, takes as long as running a token. It is not measured on the machine at hand.
ROWS_PER_TOKEN, DOCUMENTS_PER_TOKEN = 128, 4

# The multiply-adds of a token in the layers of MiniLM-L6. Smaller models are slower than their own tell.
_LEAST_MULTIPLY_ADDS = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
# Comparing two rows takes as long as their multiply-adds and this many more, for maxima and moving numbers:
# between 60 and 370 in plain torch for queries of 256 to 6,000 rows and 16 to 384 dimensions, by the time of
# a core, relative to the layers' products on the same core.
_MORE_A_COMPARISON = 256
# Matches are found in plain torch and float32 behind the score, with the place of each maximum.
EXPLAINED = 3


@dataclass(frozen=True, slots=True)
class ScoringPrice:
    """What MaxSim costs: query rows x document rows, in tokens.

    Rows of a document cost `ROWS_PER_TOKEN` a token, whatever the query, while that has at most
    `usual_query_rows`: reading them takes longest. Longer queries cost in proportion, by multiply-adds."""

    usual_query_rows: float

    @classmethod
    def of(cls, model: LoadedModel) -> Self:
        """By the dimensions of a model's vectors, and the multiply-adds of a token in its layers."""
        task = model.tasks.get(model.score_task)
        compared = (1 if task is None else task.dim) + _MORE_A_COMPARISON
        config = getattr(model.backbone, "config", None)
        return cls(max(_LEAST_MULTIPLY_ADDS, _multiply_adds(config)) / compared / ROWS_PER_TOKEN)

    def rows(self, query_rows: int, document_rows: int, times: int = 1) -> float:
        """As how many rows against a usual query those of a document count whose scores are made `times`
        times."""
        return document_rows * max(1.0, times * query_rows / self.usual_query_rows)

    def parts(self, query_rows: int, document_rows: int, most: int, times: int = 1) -> int:
        """Into how many parts a query is divided, so that the rows of a document count as at most `most`
        for each. None is smaller than a usual query: smaller parts cost no less."""
        wanted = ceil(self.rows(query_rows, document_rows, times) / most)
        return max(1, min(wanted, query_rows, int(times * query_rows / self.usual_query_rows)))

    def tokens(self, rows: float, documents: int) -> int:
        """The price of that many `rows`, of some cached documents; at least 1."""
        return max(1, ceil(rows / ROWS_PER_TOKEN + documents / DOCUMENTS_PER_TOKEN))

    def beside(self, query_rows: int, document_rows: int, times: int = 1) -> int:
        """What scoring a document costs that is run in the same step, beyond a usual query's score, which its
        tokens pay for."""
        return int((self.rows(query_rows, document_rows, times) - document_rows) / ROWS_PER_TOKEN)


def _multiply_adds(config: Any) -> int:
    """Of one token in the linear layers of a backbone, by its configuration; 0 where that does not tell."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = (int(getattr(text, name, 0) or 0) for name in ("hidden_size", "num_hidden_layers"))
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    return layers * (4 * hidden * hidden + 2 * hidden * inner)
