"""Scores equal the reference in whatever way a checkpoint of a proven family is set, stored, meant or run."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.checkpoint.detect import with_architecture
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.several.cascade import Stage, run_cascade
from tests.checkpoints import (
    adapters,
    architectures,
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
from tests.checkpoints.weights import save_module_list, save_modules
from tests.engines import Engines
from tests.parity import changes, plain_models, references
from tests.parity.changes import OF_ALL, OF_TEXTS, Build, Edit, added, converted, reads, settings
from tests.parity.conftest import Changed
from tests.parity.families import dequantised
from tests.parity.selection import with_names
from tests.unit.calling_handlers import Caller, RecordingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, eq=False)
class Variant:
    """A checkpoint with edits, options, its expected execution, and the reference's weights. A `kind`, a
    class of sentence-transformers, or `documents` that `QUERY` asks for make the comparison stricter."""

    name: str
    build: Build
    reference: references.Reference
    options: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    execution: str | None = "packed"
    weights: Callable[[str], str] = str
    exhaustive: bool = False
    kind: type[Any] | None = None
    documents: tuple[str, ...] = ()


def _beside(name: str) -> Callable[[str], str]:
    return lambda path: str(Path(path).parent / name)


_merged, _original = _beside("merged"), _beside("hf")


def _copied(folder: Path) -> None:
    shutil.copytree(folder, _original(str(folder)))


def _sigmoids(path: str, queries: list[str], documents: list[str]) -> Any:
    return references.sigmoid(plain_models.nemotron_rerank(path, queries, documents))


def _late(path: str, queries: Any, documents: Any, pooling: Any = None, dimensions: int | None = None) -> Any:
    """MaxSim of MultiVectorEncoder's vectors, of which tokens are merged, or the first columns kept."""
    model, normalize = references.loaded(MultiVectorEncoder, path), torch.nn.functional.normalize
    made = model.encode_query(queries), model.encode_document(documents, token_pooling=pooling)
    if dimensions is not None:
        made = tuple([normalize(rows[:, :dimensions], dim=-1) for rows in each] for each in made)
    return model.similarity_pairwise(*made).numpy()


_SNAKES = "Find documents about snakes"
_template_of_all = partial(references.qwen3_template, template="{query} is in {document}?")
_both_ways = partial(plain_models.cosines, model=plain_models.mean_of_both_ways)


def by_transformers(path: str, queries: list[str], documents: list[str]) -> Any:
    """The probabilities of transformers' classifier with one label, one pair at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        pairs = zip(queries, documents, strict=True)
        logits = [model(**tokenizer(*each, return_tensors="pt")).logits[0, 0] for each in pairs]
    return references.sigmoid(torch.stack(logits).numpy())


QUERY = "where do swallows sleep"
DOCUMENTS = ("in the reeds", "Swallows sleep in reeds, by the thousand.", "It is late in the year")


def _meant(name: str, build: Build, documents: tuple[str, ...] = DOCUMENTS, **more: Any) -> Variant:
    return Variant(name, build, **{"reference": references.cross_encoder, "documents": documents} | more)


def _saved(name: str, build: Build, kind: Any = SentenceTransformer, edits: Any = (), **more: Any) -> Variant:
    more |= {"edits": edits, "execution": None, "kind": kind}
    return Variant(name, build, partial(_by_library, kind=kind), **more)


def _loaded(path: str, kind: type[Any]) -> Any:
    """Activations are imported, which takes trust there."""
    return kind(path, device="cpu", trust_remote_code=True)


def _by_library(path: str, queries: list[str], documents: list[str], kind: type[Any]) -> Any:
    """One by one, so that nothing is padded."""
    model = _loaded(path, kind)
    if isinstance(model, CrossEncoder):
        return np.asarray(model.predict([*zip(queries, documents, strict=True)], batch_size=1))
    encoded = model.encode_query(queries, batch_size=1), model.encode_document(documents, batch_size=1)
    return model.similarity_pairwise(*encoded).numpy()


_SHORT = settings("tokenizer_config.json", model_max_length=60)
_LEFT = settings("tokenizer_config.json", truncation_side="left")
_LATE = {"score_type": "late-interaction"}
_GELU = "transformers.activations.GELUActivation"


def _bert(**options: Any) -> Build:
    return partial(bi_encoders.bert, **options)


def _with_template(template: str) -> Edit:
    return lambda folder: (folder / "chat_template.jinja").write_text(template)


_QUERY = "{{ messages | selectattr('role', 'equalto', 'query') | map(attribute='content') | first%s }}"
_DOCUMENT = _QUERY.replace("'query'", "'document'")
_ASKED = f"<|im_start|>user\n{_QUERY % ''}\n{_DOCUMENT}<|im_end|>\n<|im_start|>assistant\n"
_TEMPLATES = {
    "lower case, no blanks around": _ASKED % " | trim | lower",
    "the first characters": _ASKED % " | truncate(60, True, '')",
    "the document twice": f"{_QUERY % ''} {_DOCUMENT % ''}<|im_end|>{_DOCUMENT % ''}<|im_end|>",
    "a look at the length and for a word": "{% for m in messages %}{{ m.content if m.content | length < 100 "
    "else m.content[:90] }}{% if 'the' in m.content %}!{% endif %}\n{% endfor %}<|im_end|>",
    "a setting with a default, the document behind": "{{ instruction | default('find it') }}\n"
    "{{ messages[1].content | trim }}\n{{ messages[0].content }}<|im_end|>",
}

_EOS = "<|im_end|>"
_ENDING = (f"in the reeds{_EOS}", f"in{_EOS} the reeds", f"by the thousand {_EOS}{_EOS}{_EOS}", "late", _EOS)
_PADDED = ("in <pad> the reeds", "<pad><pad> by the thousand", "late in the year", "<pad>")
_TRANSFORMER = {"": "sentence_transformers.models.Transformer"}
_PROMPTS = settings("config_sentence_transformers.json", **cross_encoders.PROMPTS)

VARIANTS = [
    # Rerankers that score behind each layer are asked for one. Passages may be compressed behind layers.
    *(Variant(f"{build.__name__} behind layer {layer}", build, partial(reference, layer=layer),
              {"cutoff_layer": layer}, execution=execution, exhaustive=layer != default)
      for build, reference, execution, default in (
          (retrained.bge_minicpm, plain_models.bge_minicpm, "packed", 2),
          (retrained.bge_gemma2, plain_models.bge_gemma2, "packed", 3))
      for layer in (2, 3, 4)),
    *(Variant(f"compressed by {ratio} behind {layers}, {cutoff} layers", retrained.bge_gemma2,
              partial(plain_models.bge_gemma2, layer=cutoff, ratio=ratio, compressed=layers),
              {"cutoff_layer": cutoff, "compress_ratio": ratio,
               "compress_layers": ",".join(map(str, layers))}, execution="padded", exhaustive=i != 1)
      for i, (ratio, layers, cutoff) in enumerate([
          (4, (2,), 4), (8, (1, 2, 3), 4), (2, (1, 3), 2),  # layer 3 is not run
          (2, (2,), 4), (8, (1,), 4), (2, (1, 3), 4), (4, (2, 3), 4), (2, (1,), 3)])),
    *(Variant(f"a Llama that pools by {pooling}, with a sigmoid", retrained.nemotron_rerank, _sigmoids,
              edits=(settings(pooling=pooling, sentence_transformers={"activation_fn": "torch.nn.Sigmoid"}),),
              exhaustive=pooling == "last")
      for pooling in ("cls", "last")),
    *(Variant(f"a {kind} that reads both ways by its {said}",
              partial(retrained.both_ways, kind=kind, said=said), _both_ways,
              exhaustive=said != "is_causal" or kind != "qwen3")
      for kind, said in [
          *((kind, "is_causal") for kind in ("llama", "mistral", "ministral3", "qwen2", "gemma")),
          *(("qwen3", said) for said in ("is_causal", "field", "class", "code"))]),
    Variant("LFM2 that attends to the expansion", retrained.lfm2_colbert,
            partial(plain_models.maxsims, model=plain_models.Lfm2Colbert),
            edits=(settings(OF_ALL, attend_to_expansion_tokens=True),), exhaustive=True),
    *(Variant(f"DeBERTa: {name}", partial(cross_encoders.deberta_v2, changes=tuple(changes.items())),
              references.cross_encoder, {"kernels": kernels}, exhaustive=kernels == "torch")
      for name, changes in {
          "a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
          "both kinds of positions, and types": {"position_biased_input": True, "type_vocab_size": 2},
          "queries and positions alone, of no buckets, with projections apart": {
              "pos_att_type": ["c2p"], "position_buckets": -1, "max_relative_positions": 40,
              "share_att_key": False},
          "keys and positions alone, with projections apart": {
              "pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none"},
          "absolute positions alone": {"relative_attention": False, "position_biased_input": True}}.items()
      for kernels in ("auto", "torch")),
    # As ColPali-like models keep only the tokens of pictures; here every other token of the vocabulary.
    Variant("a mask that keeps some tokens", late_interaction.native, references.multi_vector,
            edits=(settings("2_MultiVectorMask/config.json", keep_only_token_ids=list(range(0, WORDS, 2))),)),
    Variant("bge-m3, layers converted", bi_encoders.bge_m3, partial(references.bge_m3, weights=(1, 0.5, 2)),
            {"score_type": "hybrid", "hybrid_weights": "1,0.5,2"}, (converted,)),
    Variant("OpenSearch's gte, its output layer left out", sparse_encoders.opensearch_v3_gte,
            references.sparse_encoder, weights=_beside("saved")),
    Variant("sums of weights", partial(sparse_encoders.splade, strategy="sum"), references.sparse_encoder),
    # colbert-ai reads these, whatever class or modules are named, by their metadata and projection.
    *(Variant(f"Stanford ColBERT, {said}", late_interaction.stanford, references.multi_vector,
              edits=(_copied, edit), weights=_original, documents=DOCUMENTS)
      for said, edit in {
          "its transformer a module": partial(save_module_list, kinds=_TRANSFORMER),
          "pooled by modules": partial(save_modules, pooling="mean"),
          "no class": settings(architectures=None), "of a base": settings(architectures=["BertModel"]),
      }.items()),
    Variant("token pooling", late_interaction.stanford, partial(_late, pooling=HierarchicalTokenPooling(2.0)),
            {"doc_token_pooling": 2}),
    Variant("fewer dimensions", late_interaction.stanford, partial(_late, dimensions=16), {"dimensions": 16}),
    Variant("an instruction", language_models.qwen3_reranker,
            partial(references.qwen3_reranker, instruction=_SNAKES), {"instruction": _SNAKES}),
    *(Variant(f"{build.__name__} not packed", build, reference, {"packing": "off"}, execution=execution,
              exhaustive=build in (retrained.lfm2_5_embedding, t5.monot5))
      for build, reference, execution in (
          (t5.monot5, references.monot5, "padded"),
          (retrained.nemotron_rerank, plain_models.nemotron_rerank, "padded"),
          (retrained.lfm2_5_embedding,
           partial(plain_models.cosines, model=plain_models.lfm2_5_embedding), "padded"),
          (retrained.lfm2_5_colbert,
           partial(plain_models.maxsims, model=plain_models.lfm2_5_colbert), "one by one"))),
    Variant("monoT5 by torch", t5.monot5, references.monot5, {"kernels": "torch"}),
    Variant("MaxSim in tiles", late_interaction.stanford, references.multi_vector, {"maxsim": "tiled"}),
    Variant("plain MaxSim", late_interaction.stanford, references.multi_vector, {"maxsim": "reference"}),
    # LoRA, as the base with the weights that the formulas give.
    *(Variant(f"LoRA: {name}", partial(adapters.bert, **said), references.cross_encoder, weights=_merged,
              exhaustive=name != "DoRA with rsLoRA and patterns")
      for name, said in adapters.SETTINGS.items()),
    Variant("LoRA saved by its name", adapters.saved_by_name, references.cross_encoder, weights=_merged),
    Variant("LoRA of transposed layers", adapters.gpt2, references.cross_encoder, weights=_merged),
    # GGUF: blocks, answers in a tensor of their own, and decoders as what they were made from.
    *(Variant(f"GGUF in {kind}", partial(gguf_models.qwen3, kind=kind), references.qwen3_reranker,
              weights=dequantised, exhaustive=True)
      for kind in ("F32", "F16", "BF16", "Q4_0", "Q5_K")),
    Variant("GGUF in Q6_K, answers not tied", partial(gguf_models.qwen3_reranker, kind="Q6_K", tied=False),
            references.qwen3_reranker, weights=dequantised),
    Variant("GGUF of a Llama", gguf_models.llama, _template_of_all,
            {"score_template": "{{ query }} is in {{ document }}?"}, weights=_original),
    Variant("GGUF of a Gemma", gguf_models.gemma, references.bge_reranker_v2_gemma, weights=_original),
    Variant("GGUF of a Qwen2", gguf_models.qwen2, references.mxbai_rerank_v2, weights=_original,
            exhaustive=True),
    # As files mean it without saying so.
    _meant("prompts of a LogitScore", language_models.zerank_2, edits=(_PROMPTS,)),
    _meant("prompts beside a chat template that ends in padding",
         partial(cross_encoders.chatting, pad=_EOS, **cross_encoders.PROMPTS)),
    *(_meant(f"documents that end in padding: {kind}", partial(cross_encoders.padded_by_eos, kind=kind),
           _ENDING, exhaustive=kind != "qwen2")
      for kind in ("qwen2", "llama", "gpt2")),
    _meant("documents that end in padding, read both ways",
           partial(cross_encoders.padded_by_eos, kind="qwen3"), _ENDING, edits=(settings(is_causal=False),)),
    _meant("documents that end in padding, padded", cross_encoders.padded_by_eos, _ENDING,
         options={"packing": "off"}, execution="padded", exhaustive=True),
    *(_meant(f"padding in texts: {kind}", partial(architectures.classifier, model_type=kind), _PADDED,
           execution=execution, exhaustive=kind not in ("xlm-roberta", "mpnet"))
      for execution, kinds in {
          "packed": ("roberta", "xlm-roberta", "xlm-roberta-xl", "mpnet", "camembert", "data2vec-text",
                     "xmod", "roberta-prelayernorm", "esm"),
          "padded": ("ibert", "lilt"),
          "one by one": ("longformer", "luke")}.items()
      for kind in kinds),
    _meant("padding in texts, plain torch", cross_encoders.xlm_roberta, _PADDED, options={"kernels": "torch"},
         exhaustive=True),
    _meant("padding in texts, padded", cross_encoders.xlm_roberta, _PADDED, options={"packing": "off"},
         execution="padded", exhaustive=True),
    _meant("no padding token", cross_encoders.without_pad_id, (*DOCUMENTS, f"in{_EOS}")),
    *(_meant(f"architectures {said}", cross_encoders.bert, edits=(edit,), options=options,
           reference=by_transformers, exhaustive=said not in ("absent", "of another head"))
      for said, edit, options in (
          ("null", settings(architectures=None), {}), ("empty", settings(architectures=[]), {}),
          ("absent", changes.without_settings("architectures"), {"score_type": "cross-encoder"}),
          ("a string", settings(architectures="BertForSequenceClassification"), {}),
          ("of the base", settings(architectures=["BertModel"]), {}),
          ("of another head", settings(architectures=["BertForMaskedLM"]), {}))),
    *(_meant(f"architectures null: {build.__name__}", build, edits=(settings(architectures=None),),
           reference=by_transformers, exhaustive=build is not cross_encoders.qwen2)
      for build in (cross_encoders.qwen2, cross_encoders.roberta, cross_encoders.distilbert,
                    cross_encoders.deberta_v2, cross_encoders.modernbert)),
    _meant("labels counted from 1", cross_encoders.bert, edits=(settings(id2label={"1": "good"}),)),
    _meant("another family's tokenizer, some tokens without an embedding", cross_encoders.bert,
         edits=(settings("tokenizer_config.json", tokenizer_class="RobertaTokenizer"),)),
    _meant("architectures null: a save with prompts", cross_encoders.prompted,
         edits=(settings(architectures=None),)),
    # Settings in files of sentence-transformers.
    # Lengths and truncation. Each setting by default of one kind.
    *(_saved(f"texts: {', '.join(said)} of {name}", build, kind, (reads(**said), *edits), exhaustive=i != j)
      for i, (name, build, kind) in enumerate([
          ("a bi-encoder", bi_encoders.gte, SentenceTransformer),
          ("a sparse encoder", sparse_encoders.splade, SparseEncoder),
          ("late interaction", late_interaction.native, MultiVectorEncoder)])
      for j, (said, edits) in enumerate([
          ({"add_special_tokens": False}, ()), ({"max_length": 20}, ()),
          ({"truncation": False}, (settings(OF_TEXTS, max_seq_length=24),))])),
    _saved("pairs without special tokens, transformers' activation", cross_encoders.scored_by_modules,
         CrossEncoder, (reads(add_special_tokens=False), settings(OF_ALL, activation_fn=_GELU))),
    _saved("lengths of roles, cut on the left", bi_encoders.gte,
         edits=(_LEFT, settings(OF_TEXTS, query_length=8, document_length=16))),
    _saved("a length below those of roles, cut on the left", late_interaction.native, MultiVectorEncoder,
         (_LEFT, settings(OF_TEXTS, max_seq_length=20))),
    _saved("a length beyond the tokenizer's, transformers' activation", late_interaction.native,
         MultiVectorEncoder, (settings("tokenizer_config.json", model_max_length=40),
                              settings("1_Dense/config.json", activation_function=_GELU))),
    _saved("a classifier of fewer layers, cut on the left, transformers' activation", cross_encoders.bert,
         CrossEncoder, (_LEFT, _SHORT, settings(num_hidden_layers=2,
                                                sentence_transformers={"activation_fn": _GELU}))),
    _saved("a chat cut on the left", language_models.zerank_2, CrossEncoder, (_LEFT, _SHORT)),
    # Pooling, modules behind it, dimensions and similarities.
    _saved("dropout and fewer dimensions, not normalized again",
         _bert(behind="dropout", truncate_dim=16, similarity_fn_name="dot")),
    _saved("all poolings but max and cls, concatenated, and manhattan distances",
         _bert(pooling="mean_sqrt_len_tokens+weightedmean+lasttoken", behind="dense of concatenated rows",
               similarity_fn_name="manhattan")),
    _saved("max, residuals and euclidean distances",
         _bert(pooling="max", behind="residuals", similarity_fn_name="euclidean")),
    _saved("the first token, behind a prompt or without, and fewer dimensions",
         _bert(pooling="cls+max", include_prompt=False, truncate_dim=16,
               prompts={"query": "Represent it: "})),
    _saved("residuals, late", _bert(behind="residuals"), MultiVectorEncoder, options=_LATE),
    *(_saved(f"{name} of sparse vectors", sparse_encoders.splade, SparseEncoder,
           (settings(OF_ALL, similarity_fn_name=name),), exhaustive=name == "euclidean")
      for name in ("cosine", "euclidean", "manhattan")),
    # Signs of the kind of a checkpoint, and tensors that are left out.
    _saved("PyLate without its prefixes", late_interaction.pylate_modernbert, MultiVectorEncoder,
         (changes.without_settings("query_prefix", "document_prefix", file=OF_ALL),)),
    _saved("buffers and a loss", bi_encoders.sgpt,
         edits=tuple(added(name, torch.ones(4)) for name in
                     ("h.0.attn.attention.bias", "h.0.attn.attention.masked_bias", "loss_fct.weight"))),
    _saved("texts in a chat", bi_encoders.qwen3_in_chat),
    *(_saved(f"{name}, {build.__name__}", build, CrossEncoder, (_with_template(template),),
           exhaustive=i % 2 != j)
      for i, (name, template) in enumerate(_TEMPLATES.items())
      for j, build in enumerate((language_models.zerank_2, cross_encoders.qwen3_in_chat))),
    _saved("a pair without its end", language_models.zerank_2, CrossEncoder,
         (_SHORT, settings(OF_TEXTS, processing_kwargs={"chat_template": {"restore_suffix": False}}))),
]  # fmt: skip


@pytest.mark.parametrize("variant", with_names(VARIANTS))
async def test_scores_equal_the_reference(
    variant: Variant, checkpoints: SharedCheckpoints, changed: Changed, engines: Engines, pairs: list[Pair]
) -> None:
    path = changed(variant.build, *variant.edits) if variant.edits else checkpoints(variant.build)
    config = EngineConfig(model=path, **{"dtype": "float32", **variant.options})
    engine = await engines(config)
    assert variant.execution in (None, engine.device_model.execution)
    few = [Pair(pair.query, pair.document[:500]) for pair in pairs[:6]]
    if variant.kind is not None:
        few = [Pair(pair.query, f" {pair.document[:700]} ") for pair in pairs[:4]]
    few = [Pair(QUERY, document) for document in variant.documents] or few
    queries, documents = [pair.query for pair in few], [pair.document for pair in few]
    ours = await engines.scores(config, few)
    expected = variant.reference(variant.weights(path), queries, documents)
    least = 0 if variant.documents else 0.002
    assert expected.std() > least, "the checkpoint must tell pairs apart, or this test shows nothing"
    exact = variant.kind is not None or bool(variant.documents)
    # float32 rounds in proportion to the largest number.
    atol = 1e-5 * max(1.0, float(np.abs(expected).max())) if exact else 1e-4
    np.testing.assert_allclose(ours, expected, atol=atol, rtol=0 if variant.documents else 1e-5)
    if variant.kind is SentenceTransformer:
        found = await engine.embed(documents, input_type="document", truncation=CUT_LONG)
        theirs = _loaded(path, variant.kind).encode_document(documents)
        np.testing.assert_allclose(found.embeddings, theirs, atol=1e-5, rtol=1e-5)


async def test_a_base_without_a_classifier_becomes_one(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    path = checkpoints(partial(adapters.bert, **adapters.SETTINGS["a classifier and a bias"]))
    adapters.without_classifier(Path(path), tmp_path / "adapter", tmp_path / "base")
    paths = str(tmp_path / "adapter"), _merged(path)
    ours, merged = [await engines.scores(EngineConfig(model=x, dtype="float32"), pairs[:6]) for x in paths]
    np.testing.assert_allclose(ours, merged, atol=1e-5)


async def test_another_adapter_of_jina_v5_is_named_by_its_folder(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path, texts = checkpoints(retrained.jina_v5_small), [pair.document for pair in pairs[:5]]
    engine = await engines(EngineConfig(model=f"{path}/adapters/text-matching", dtype="float32"))
    ours = (await engine.embed(texts)).embeddings
    tasks = [plain_models.jina_v5(path, task) for task in ("text-matching", "retrieval")]
    expected, other = (np.stack(model.encode_document(texts)) for model in tasks)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert np.abs(other - expected).max() > 0.01


async def test_convolutions_may_be_padded(changed: Changed, engines: Engines, pairs: list[Pair]) -> None:
    edit = settings(conv_zero_padding=True, model_type="lfm2_bidirectional")
    path, scores = changed(retrained.lfm2_5_colbert, edit), []
    for packing, execution in (("auto", "packed"), ("off", "padded")):
        config = EngineConfig(model=path, dtype="float32", packing=packing)  # type: ignore[arg-type]
        assert (await engines(config)).device_model.execution == execution
        scores.append(await engines.scores(config, pairs[:6]))
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


async def test_equal_scores_are_ranked_by_their_logits(changed: Changed) -> None:
    path = changed(cross_encoders.bert, added("classifier.bias", torch.tensor([40.0])))
    documents = DOCUMENTS[::-1]
    asked = [(QUERY, document) for document in documents]
    logits = references.loaded(CrossEncoder, path).predict(asked, activation_fn=torch.nn.Identity())
    best = np.argsort(-logits).tolist()
    assert best != [0, 1, 2]
    body = {"query": QUERY, "documents": [*documents], "top_n": 2}
    async with RecordingEngine(EngineConfig(model=path, dtype="float32")) as engine:
        caller = Caller(engine)
        found = [(await engine.rerank(QUERY, documents, normalize=each)).results for each in (False, True)]
        assert {one.score for results in found for one in results} == {1.0}
        orders = [[one.index for one in results] for results in found]
        stages = [Stage("one", keep=2), Stage("one")]
        cascade = await run_cascade(lambda _: engine, QUERY, documents, stages, None, {})
        orders.append([one.index for one in cascade.results] + best[2:])
        for more in ({}, {"stream": True}):
            last = (await caller.post("/rerank", body | more)).body.splitlines()[-1]
            orders.append([one["index"] for one in json.loads(last)["results"]] + best[2:])
    assert orders == [best] * 5


async def test_labels_are_those_of_the_weights(three_label_classifier: str, changed: Changed) -> None:
    edits = settings(architectures=None), changes.without_settings("id2label", "label2id")
    for path in (three_label_classifier, changed(partial(cross_encoders.bert, labels=3), *edits)):
        async with Engine(EngineConfig(model=path, dtype="float32")) as engine:
            with pytest.raises(InvalidRequestError, match=r"3 labels.*LABEL_0, LABEL_1.*option score_label"):
                await engine.score("a", ["b"])
            found = await engine.classify([*DOCUMENTS], use_activation=False)
        assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3).eval()
        with torch.inference_mode():
            expected = [model(**tokenizer(each, return_tensors="pt")).logits[0].numpy() for each in DOCUMENTS]
        np.testing.assert_allclose(found.scores, expected, atol=1e-5)


async def test_classes_are_found_by_their_weights(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    for build, architecture in (
        (bi_encoders.bge, "BertModel"), (bi_encoders.qwen3, "Qwen3Model"),
        (language_models.qwen3_reranker, "Qwen3ForCausalLM"), (sparse_encoders.plain, "BertForMaskedLM"),
    ):  # fmt: skip
        path = checkpoints.copy(build, tmp_path / architecture)
        settings(architectures=None)(path)
        found = with_architecture(str(path), None, read_files(str(path), None))
        assert found.architecture == architecture


async def test_fewer_dimensions_may_stay_unscaled(checkpoints: SharedCheckpoints, engines: Engines) -> None:
    path = checkpoints(_bert(behind="dense behind normalize"))
    ours = await (await engines(EngineConfig(model=path, dtype="float32"))).embed(["a text"], dimensions=16)
    expected = SentenceTransformer(path, device="cpu").encode(["a text"], truncate_dim=16)
    np.testing.assert_allclose(ours.embeddings, expected, atol=1e-5)


@pytest.mark.parametrize(("label", "named", "multi"), [(None, "yes", False), ("LABEL_2", None, True)])
async def test_the_probability_of_a_label_is_a_score(
    label: str | None, named: str | None, multi: bool, changed: Changed, engines: Engines, pairs: list[Pair]
) -> None:
    labels = {str(i): f"LABEL_{i}" for i in range(3)} | ({"1": named} if named else {})
    kind = {"problem_type": "multi_label_classification"} if multi else {}
    path = changed(partial(cross_encoders.bert, labels=3), settings(id2label=labels, **kind))
    config = EngineConfig(model=path, dtype="float32", score_label=label)
    few = [Pair(pair.query, pair.document[:300]) for pair in pairs[:4]]
    texts = [pair.query for pair in few], [pair.document for pair in few]
    logits = torch.from_numpy(_by_library(path, *texts, CrossEncoder))
    probabilities = torch.sigmoid(logits) if multi else torch.softmax(logits, dim=1)
    ours = await engines.scores(config, few)
    np.testing.assert_allclose(ours, probabilities[:, 2 if multi else 1], atol=1e-5)
    assert (await engines(config)).facts.scales.default.most == 1
