"""Which strategy a model needs. Whoever adds a way to score adds it here."""

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.preprocess.listwise import ListwiseStrategy
from maxsimd.engine.preprocess.long_inputs import LengthLimits
from maxsimd.engine.preprocess.pairs import PairStrategy
from maxsimd.engine.preprocess.strategy import ScoreStrategy
from maxsimd.engine.preprocess.template_pairs import TemplateJoiner
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.preprocess.tokenizer_pairs import TokenizerJoiner
from maxsimd.engine.preprocess.two_stage import TwoStageStrategy


def score_strategy(
    model: LoadedModel,
    tokenizer: TextTokenizer,
    limits: LengthLimits,
    cache: EmbeddingCache | None,
    share_prefixes: bool,
) -> ScoreStrategy:
    """The way to prepare score requests to a model."""
    if model.listwise is not None:
        return ListwiseStrategy(model.listwise, model.instruction, tokenizer, limits)
    if model.score_task != "classify":
        return TwoStageStrategy(model, tokenizer, limits, cache)
    template = model.pairs.template
    if template is None:
        joiner = TokenizerJoiner(tokenizer, model.pairs.truncation)
        return PairStrategy(joiner, tokenizer, limits, share_prefixes)
    return PairStrategy(
        TemplateJoiner(tokenizer, template, model.instruction), tokenizer, limits, share_prefixes
    )
