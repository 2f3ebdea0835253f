"""Writes the recipes of the embedded model that the package ships: `python -m tests.embedded_recipes`."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from maxsimd.engine.checkpoint.library import read_with_libraries
from maxsimd.engine.checkpoint.recipe import make_recipe
from maxsimd.engine.checkpoint.recipe_store import SHIPPED, Shipped, source_of, texts_content
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.text_check import check_texts

SCORE_TYPES = ("auto", "late-interaction", "bi-encoder")


def made_anew(score_types: Sequence[str] = SCORE_TYPES) -> Shipped:
    """Recipes that the package ships for these types. Raises ModelLoadError if texts are read otherwise."""
    recipes, texts = {}, []
    for score_type in score_types:
        config = EngineConfig(score_type=score_type)  # type: ignore[arg-type]
        source = source_of(config)
        assert source is not None
        loaded = read_with_libraries(config, torch.device("cpu"))
        recipes[source.content], made = make_recipe(loaded, source.folder, source.module_folders)
        model = replace(made, reader=loaded.reader)
        check_texts(model, config, TextTokenizer(model.tokenizer), None)
        texts.append(texts_content(config) or "")
    return Shipped(recipes, tuple(texts))


if __name__ == "__main__":
    SHIPPED.write_bytes(msgspec.json.format(msgspec.json.encode(made_anew()), indent=1) + b"\n")
