"""Which strategy a model needs. Whoever adds a way to score adds it here."""

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.scores import ScoreCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.processors.cached_scores import CachedScoresStrategy
from maxsimd.engine.processors.listwise import ListwiseStrategy
from maxsimd.engine.processors.pages import page_builder
from maxsimd.engine.processors.pairs import PairStrategy, PrefixSharing
from maxsimd.engine.processors.picture_pairs import PicturePairJoiner
from maxsimd.engine.processors.strategy import ScoreStrategy
from maxsimd.engine.processors.template_pairs import TemplateJoiner
from maxsimd.engine.processors.text.long_inputs import LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.tokenizer_pairs import TokenizerJoiner
from maxsimd.engine.processors.two_stage import TwoStageStrategy


def score_strategy(
    model: LoadedModel,
    tokenizer: TextTokenizer,
    limits: LengthLimits,
    cache: EmbeddingCache | ScoreCache | None,
    sharing: PrefixSharing | None,
) -> ScoreStrategy:
    """The way to prepare score requests to a model. The cache has embeddings where documents are run without
    their query, else scores."""
    if model.score_task != "classify" and model.listwise is None:
        assert not isinstance(cache, ScoreCache)
        return TwoStageStrategy(model, tokenizer, limits, cache)
    strategy = _together(model, tokenizer, limits, sharing)
    if isinstance(cache, ScoreCache):
        return CachedScoresStrategy(strategy, cache, together=model.listwise is not None)
    return strategy


def _together(
    model: LoadedModel, tokenizer: TextTokenizer, limits: LengthLimits, sharing: PrefixSharing | None
) -> ScoreStrategy:
    if model.listwise is not None:
        return ListwiseStrategy(model.listwise, model.instruction, tokenizer, limits)
    template = model.pairs.template
    if template is None:
        joiner = TokenizerJoiner(tokenizer, model.pairs.truncation)
        return PairStrategy(joiner, tokenizer, limits, sharing, model)
    by_template = TemplateJoiner(tokenizer, template, model.instruction)
    pages = page_builder(model, tokenizer, limits.longest_sequence)
    if pages is None:
        return PairStrategy(by_template, tokenizer, limits, sharing, model)
    with_pictures = PicturePairJoiner(
        by_template, template, model.instruction, tokenizer, pages, limits.longest_sequence
    )
    return PairStrategy(with_pictures, tokenizer, limits, sharing, model)
