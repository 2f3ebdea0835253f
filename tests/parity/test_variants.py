"""Scores equal the reference in whatever way a checkpoint of a proven family is set, stored or run: options,
settings of its files, adapters, and blocks of weights. `make test` has some of each, `make test-all` all."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.checkpoints import (
    adapters,
    bi_encoders,
    cross_encoders,
    gguf_models,
    language_models,
    late_interaction,
    retrained,
    sparse_encoders,
    t5,
)
from tests.checkpoints.shared import SharedCheckpoints
from tests.checkpoints.tokenizers import WORDS
from tests.engines import Engines
from tests.parity import plain_models, references
from tests.parity.changes import Build, Edit, converted, settings
from tests.parity.families import dequantised
from tests.parity.selection import with_names

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, eq=False)
class Variant:
    """A checkpoint, edits of a copy of it, the engine's options, how it is expected to run, and where the
    reference finds the weights."""

    name: str
    build: Build
    reference: references.Reference
    options: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    execution: str = "packed"
    weights: Callable[[str], str] = str
    exhaustive: bool = False


def _merged(path: str) -> str:
    return str(Path(path).parent / "merged")


def _original(path: str) -> str:
    return str(Path(path).parent / "hf")


def _sigmoids(path: str, queries: list[str], documents: list[str]) -> Any:
    return references.sigmoid(plain_models.nemotron_rerank(path, queries, documents))


def _late(
    path: str, queries: list[str], documents: list[str], pooling: Any = None, dimensions: int | None = None
) -> Any:
    """MaxSim of MultiVectorEncoder's vectors, of which tokens are merged, or the first columns kept."""
    model = references.loaded(MultiVectorEncoder, path)
    first, second = model.encode_query(queries), model.encode_document(documents, token_pooling=pooling)
    if dimensions is not None:
        first, second = (
            [torch.nn.functional.normalize(rows[:, :dimensions], dim=-1) for rows in each]
            for each in (first, second)
        )
    return model.similarity_pairwise(first, second).numpy()


_SNAKES = "Find documents about snakes"
_template_of_all = partial(references.qwen3_template, template="{query} is in {document}?")
_both_ways = partial(plain_models.cosines, model=plain_models.mean_of_both_ways)


VARIANTS = [
    # Of rerankers that score behind each layer, one is asked for. Passages may be compressed behind layers.
    *(
        Variant(f"{build.__name__} behind layer {layer}", build, partial(reference, layer=layer),
                {"cutoff_layer": layer}, execution=execution, exhaustive=layer != default)
        for build, reference, execution, default in (
            (retrained.bge_minicpm, plain_models.bge_minicpm, "packed", 2),
            (retrained.bge_gemma2, plain_models.bge_gemma2, "packed", 3),
        )
        for layer in (2, 3, 4)
    ),
    *(
        Variant(f"compressed by {ratio} behind {layers}, {cutoff} layers", retrained.bge_gemma2,
                partial(plain_models.bge_gemma2, layer=cutoff, ratio=ratio, compressed=layers),
                {"cutoff_layer": cutoff, "compress_ratio": ratio,
                 "compress_layers": ",".join(map(str, layers))},
                execution="padded", exhaustive=i != 1)
        for i, (ratio, layers, cutoff) in enumerate([
            (4, (2,), 4), (8, (1, 2, 3), 4), (2, (1, 3), 2),  # the last of which is not run
            (2, (2,), 4), (8, (1,), 4), (2, (1, 3), 4), (4, (2, 3), 4), (2, (1,), 3),
        ])
    ),
    # What files say.
    *(
        Variant(f"a Llama that pools by {pooling}, with a sigmoid", retrained.nemotron_rerank, _sigmoids,
                edits=(settings(pooling=pooling,
                                sentence_transformers={"activation_fn": "torch.nn.Sigmoid"}),),
                exhaustive=pooling == "last")
        for pooling in ("cls", "last")
    ),
    *(
        Variant(f"a {kind} that reads both ways by its {said}",
                partial(retrained.both_ways, kind=kind, said=said), _both_ways,
                exhaustive=said != "is_causal" or kind != "qwen3")
        for kind, said in [
            *((kind, "is_causal") for kind in ("llama", "mistral", "ministral3", "qwen2", "gemma")),
            *(("qwen3", said) for said in ("is_causal", "field", "class", "code")),
        ]
    ),
    Variant("LFM2 that attends to the expansion", retrained.lfm2_colbert,
            partial(plain_models.maxsims, model=plain_models.Lfm2Colbert),
            edits=(settings("config_sentence_transformers.json", attend_to_expansion_tokens=True),),
            exhaustive=True),
    *(
        Variant(f"DeBERTa: {name}",
                partial(cross_encoders.deberta_v2, changes=tuple(changes.items())),
                references.cross_encoder, {"kernels": kernels}, exhaustive=kernels == "torch")
        for name, changes in {
            "a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
            "both kinds of positions, and types": {"position_biased_input": True, "type_vocab_size": 2},
            "queries and positions alone, of no buckets, with projections apart": {
                "pos_att_type": ["c2p"], "position_buckets": -1, "max_relative_positions": 40,
                "share_att_key": False,
            },
            "keys and positions alone, with projections apart": {
                "pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none",
            },
            "absolute positions alone": {"relative_attention": False, "position_biased_input": True},
        }.items()
        for kernels in ("auto", "torch")
    ),
    # As ColPali-like models keep only the tokens of pictures; here every other token of the vocabulary.
    Variant("a mask that keeps some tokens", late_interaction.native, references.multi_vector,
            edits=(settings("2_MultiVectorMask/config.json", keep_only_token_ids=list(range(0, WORDS, 2))),)),
    Variant("bge-m3, layers converted", bi_encoders.bge_m3, partial(references.bge_m3, weights=(1, 0.5, 2)),
            {"score_type": "hybrid", "hybrid_weights": "1,0.5,2"}, (converted,)),
    Variant("sums of weights", sparse_encoders.splade_sum, references.sparse_encoder),
    # Options.
    Variant("token pooling", late_interaction.stanford, partial(_late, pooling=HierarchicalTokenPooling(2.0)),
            {"doc_token_pooling": 2}),
    Variant("fewer dimensions", late_interaction.stanford, partial(_late, dimensions=16), {"dimensions": 16}),
    Variant("an instruction", language_models.qwen3_reranker,
            partial(references.qwen3_reranker, instruction=_SNAKES), {"instruction": _SNAKES}),
    # Ways to run.
    *(
        Variant(f"{build.__name__} not packed", build, reference, {"packing": "off"}, execution=execution,
                exhaustive=build in (retrained.lfm2_5_embedding, t5.monot5))
        for build, reference, execution in (
            (t5.monot5, references.monot5, "padded"),
            (retrained.nemotron_rerank, plain_models.nemotron_rerank, "padded"),
            (retrained.lfm2_5_embedding,
             partial(plain_models.cosines, model=plain_models.lfm2_5_embedding), "padded"),
            (retrained.lfm2_5_colbert,
             partial(plain_models.maxsims, model=plain_models.lfm2_5_colbert), "one by one"),
        )
    ),
    Variant("monoT5 by torch", t5.monot5, references.monot5, {"kernels": "torch"}),
    Variant("MaxSim in tiles", late_interaction.stanford, references.multi_vector, {"maxsim": "tiled"}),
    Variant("plain MaxSim", late_interaction.stanford, references.multi_vector, {"maxsim": "reference"}),
    # LoRA, as the base with the weights that the formulas give.
    *(
        Variant(f"LoRA: {name}", partial(adapters.bert, **said), references.cross_encoder, weights=_merged,
                exhaustive=name != "DoRA with rsLoRA and patterns")
        for name, said in adapters.SETTINGS.items()
    ),
    Variant("LoRA saved by its name", adapters.saved_by_name, references.cross_encoder, weights=_merged),
    Variant("LoRA of transposed layers", adapters.gpt2, references.cross_encoder, weights=_merged),
    # GGUF: blocks, answers in a tensor of their own, and decoders as what they were made from.
    *(
        Variant(f"GGUF in {kind}", partial(gguf_models.qwen3, kind=kind), references.qwen3_reranker,
                weights=dequantised, exhaustive=True)
        for kind in ("F32", "F16", "BF16", "Q4_0", "Q5_K")
    ),
    Variant("GGUF in Q6_K, answers not tied", partial(gguf_models.qwen3_reranker, kind="Q6_K", tied=False),
            references.qwen3_reranker, weights=dequantised),
    Variant("GGUF of a Llama", gguf_models.llama, _template_of_all,
            {"score_template": "{{ query }} is in {{ document }}?"}, weights=_original),
    Variant("GGUF of a Gemma", gguf_models.gemma, references.bge_reranker_v2_gemma, weights=_original),
    Variant("GGUF of a Qwen2", gguf_models.qwen2, references.mxbai_rerank_v2, weights=_original,
            exhaustive=True),
]  # fmt: skip


@pytest.mark.parametrize("variant", with_names(VARIANTS))
async def test_scores_equal_the_reference(
    variant: Variant,
    checkpoints: SharedCheckpoints,
    changed: Callable[..., str],
    engines: Engines,
    pairs: list[Pair],
) -> None:
    path = changed(variant.build, *variant.edits) if variant.edits else checkpoints(variant.build)
    config = EngineConfig(model=path, **{"dtype": "float32", **variant.options})
    engine = await engines(config)
    assert engine.device_model.prepared.execution == variant.execution
    few = [Pair(pair.query, pair.document[:500]) for pair in pairs[:6]]
    ours = await engines.scores(config, few)
    expected = variant.reference(
        variant.weights(path), [pair.query for pair in few], [pair.document for pair in few]
    )
    assert expected.std() > 0.002, "the checkpoint must tell pairs apart, or this test shows nothing"
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=1e-5)


async def test_a_base_without_a_classifier_becomes_one(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    path = checkpoints(partial(adapters.bert, **adapters.SETTINGS["a classifier and a bias"]))
    adapters.without_classifier(Path(path), tmp_path / "adapter", tmp_path / "base")
    ours, merged = [
        await engines.scores(EngineConfig(model=each, dtype="float32"), pairs[:6])
        for each in (str(tmp_path / "adapter"), _merged(path))
    ]
    np.testing.assert_allclose(ours, merged, atol=1e-5)


async def test_another_adapter_of_jina_v5_is_named_by_its_folder(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path, texts = checkpoints(retrained.jina_v5_small), [pair.document for pair in pairs[:5]]
    engine = await engines(EngineConfig(model=f"{path}/adapters/text-matching", dtype="float32"))
    ours = (await engine.embed(texts)).embeddings
    expected, other = (
        np.stack(plain_models.jina_v5(path, task).encode_document(texts))
        for task in ("text-matching", "retrieval")
    )
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert np.abs(other - expected).max() > 0.01


async def test_convolutions_are_alike_packed_and_padded(
    changed: Callable[..., str], engines: Engines, pairs: list[Pair]
) -> None:
    """Configs for later versions of transformers say which."""
    edit = settings(conv_zero_padding=True, model_type="lfm2_bidirectional")
    path, scores = changed(retrained.lfm2_5_colbert, edit), []
    for packing, execution in (("auto", "packed"), ("off", "padded")):
        config = EngineConfig(model=path, dtype="float32", packing=packing)  # type: ignore[arg-type]
        assert (await engines(config)).device_model.prepared.execution == execution
        scores.append(await engines.scores(config, pairs[:6]))
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
