"""The processors of a model. A new kind of model registers its processor here."""

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.processors.cross_encoder import CrossEncoderProcessor
from maxsimd.engine.processors.dual_encoder import DualEncoderProcessor, QueryProcessor
from maxsimd.engine.processors.embedding import EmbeddingProcessor
from maxsimd.engine.processors.labels import LabelProcessor, LanguageModelProcessor
from maxsimd.engine.processors.listwise import ListwiseProcessor
from maxsimd.engine.processors.processor import ProcessorContext, ScoreProcessor
from maxsimd.engine.processors.text.builder import LengthLimits, shortest_text
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.token_classification import (
    TokenClassificationProcessor,
    UnscoredProcessor,
    no_score,
)

# Each kind of model that scores documents.
SCORE_PROCESSORS: tuple[type[ScoreProcessor], ...] = (
    DualEncoderProcessor,
    CrossEncoderProcessor,
    ListwiseProcessor,
    LanguageModelProcessor,
    UnscoredProcessor,
)


class Processors:
    """The processors of all requests to one model. Thread-safe."""

    def __init__(self, context: ProcessorContext) -> None:
        model = context.model
        self.scores = next(kind for kind in SCORE_PROCESSORS if kind.is_for(model))(context)
        self.embedding = EmbeddingProcessor(context)
        self.token_classification = TokenClassificationProcessor(context)

    @property
    def queries(self) -> QueryProcessor:
        """Raises InvalidRequestError for a model that does not read queries by themselves."""
        if isinstance(self.scores, UnscoredProcessor):
            raise no_score("queries")
        if not isinstance(self.scores, DualEncoderProcessor):
            raise InvalidRequestError(
                "this model reads query and document together, so that a query has no embedding by itself; "
                "score its text",
                "queries",
            )
        return self.scores.queries

    @property
    def labels(self) -> LabelProcessor:
        """Raises InvalidRequestError for a model that is not served as a language model."""
        if not isinstance(self.scores, LanguageModelProcessor):
            raise InvalidRequestError(
                "this model scores no labels that a request names; serve a *ForCausalLM checkpoint with "
                'score_type="language-model"',
                "model",
            )
        return self.scores.labels


def check_room(model: LoadedModel, tokenizer: TextTokenizer, budget: int, chunked: bool) -> None:
    """Checks at start that the shortest sequence of each kind can be run.

    Raises ModelLoadError if one is longer than the model takes, or than a step's `budget` of tokens unless
    it can be run in chunks, and if the model's template has tokens without an embedding."""
    try:
        shortest_of = shortest_sequences(model, tokenizer)
    except InvalidRequestError as error:
        raise ModelLoadError(f"what {model.name!r} puts around texts cannot be run: {error}") from error
    for kind, tokens in shortest_of.items():
        shortest = f"{kind} of {model.name!r} has at least {tokens} tokens with all that stands around it"
        if tokens > model.max_tokens:
            raise ModelLoadError(
                f"{shortest}, but the longest input is {model.max_tokens} tokens; raise max_model_len if it "
                "is set, or max_seq_length in sentence_bert_config.json or model_max_length in "
                "tokenizer_config.json"
            )
        if not chunked and tokens > budget:
            raise ModelLoadError(
                f"{shortest}, but a step takes no more than {budget}; raise max_batch_tokens to at least "
                f"{tokens}"
            )


def shortest_sequences(model: LoadedModel, tokenizer: TextTokenizer) -> dict[str, int]:
    """Returns the tokens of the shortest sequence of each kind, by its name in errors."""
    limits = LengthLimits(model.max_tokens, window_overlap=0)
    shortest = Processors(ProcessorContext(model, tokenizer, limits)).scores.shortest_sequences()
    # A listwise model takes no texts by themselves.
    if model.listwise is None:
        shortest["a text"] = shortest_text(model.text, tokenizer)
    return shortest
