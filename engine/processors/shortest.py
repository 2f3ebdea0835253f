"""Whether the shortest sequences that requests can make fit: what must fit if a model is to be of any use.

Asked at start, so that a budget or a length that is too small is refused there and not by the first request.
"""

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.processors.choice import score_strategy
from maxsimd.engine.processors.single_texts import TextStrategy
from maxsimd.engine.processors.text.long_inputs import LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer


def check_room(model: LoadedModel, tokenizer: TextTokenizer, budget: int, chunked: bool) -> None:
    """Raises ModelLoadError where the shortest sequence of some kind is longer than the model takes, or,
    unless it can be run in chunks, than a step's `budget` of tokens; and where its template has tokens
    without an embedding."""
    try:
        shortest_of = shortest_sequences(model, tokenizer)
    except InvalidRequestError as error:
        raise ModelLoadError(f"what {model.name!r} puts around texts cannot be run: {error}") from error
    for kind, tokens in shortest_of.items():
        shortest = f"{kind} of {model.name!r} has at least {tokens} tokens with all that stands around it"
        if tokens > model.max_tokens:
            raise ModelLoadError(
                f"{shortest}, but the longest input is {model.max_tokens} tokens; leave out max_model_len "
                "or raise it"
            )
        if not chunked and tokens > budget:
            raise ModelLoadError(
                f"{shortest}, but a step takes no more than {budget}; raise max_batch_tokens to at least "
                f"{tokens}"
            )


def shortest_sequences(model: LoadedModel, tokenizer: TextTokenizer) -> dict[str, int]:
    """How many tokens the shortest sequence of each kind has, by what errors call it."""
    limits = LengthLimits(model.max_tokens, window_overlap=0)
    shortest = score_strategy(model, tokenizer, limits, cache=None, sharing=None).shortest_sequences()
    # A listwise model takes no single texts.
    if model.listwise is None:
        shortest |= TextStrategy(model, tokenizer, limits).shortest_sequences()
    return shortest
