"""Sparse encoders, as they are published."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

from tests.checkpoints import gte
from tests.checkpoints.cross_encoders import MODERNBERT
from tests.checkpoints.tokenizers import WORDS, wordpiece
from tests.checkpoints.tokenizers import xlm_roberta as xlm_roberta_tokenizer
from tests.checkpoints.weights import save, save_own, sizes_of, spread


def _backbone(folder: Path, kind: str, size: int = WORDS, bias: float = -3.5, **settings: Any) -> Path:
    """Random weights under which most words weigh nothing, and the others about as much as trained ones."""
    config = CONFIG_MAPPING[kind](**sizes_of(kind) | {"vocab_size": size} | settings)
    model = spread(AutoModelForMaskedLM.from_config(config), embedding=0.12)
    with torch.no_grad():
        model.get_output_embeddings().bias.fill_(bias)
    model.save_pretrained(folder / "backbone")
    if size == WORDS:
        wordpiece().save_pretrained(folder / "backbone")
    return folder


def _saved(folder: Path, pooling: SpladePooling, **options: Any) -> str:
    transformer = Transformer(str(folder / "backbone"), transformer_task="fill-mask")
    return save_own(SparseEncoder(modules=[transformer, pooling], device="cpu", **options), folder / "saved")


def splade(folder: Path, decoder: bool = False, strategy: Any = "max") -> str:
    """naver/splade-v3: BERT's masked words, the greatest weights; the first naver/splade has their sum."""
    return _written(_saved(_backbone(folder, "bert"), SpladePooling(strategy)), decoder)


def _written(path: str, decoder: bool) -> str:
    """With `decoder` the output matrix is in the file, too, as it is in pickles, though it is the input's."""
    if decoder:
        file = Path(path) / "model.safetensors"
        tensors = load_file(file)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def splade_heaviest(folder: Path, decoder: bool = False) -> str:
    """A save with max_active_dims, behind prompts."""
    prompts = {"query": "query: ", "document": "passage: "}
    saved = _saved(_backbone(folder, "bert"), SpladePooling("max"), max_active_dims=100, prompts=prompts)
    return _written(saved, decoder)


def plain(folder: Path, decoder: bool = False) -> str:
    """naver/splade-cocondenser-ensembledistil as transformers saves it: BertForMaskedLM and nothing else."""
    return _written(str(_backbone(folder, "bert") / "backbone"), decoder)


def opensearch_v3(folder: Path) -> str:
    """opensearch-neural-sparse-encoding-doc-v3-distill: documents by DistilBERT, queries by a table."""
    sizes = {"dim": 128, "n_layers": 3, "n_heads": 4, "hidden_dim": 256}
    return _looked_up(_backbone(folder, "distilbert", bias=-1.5, **sizes))


def opensearch_v3_gte(folder: Path) -> str:
    """...-doc-v3-gte: code of its own, the transformer at the root, without its output layer, which is tied.

    `saved` beside it holds the same weights in transformers' own terms."""
    saved = Path(_looked_up(_backbone(folder, "gte", bias=-1.5, pad_token_id=0)))
    published, inner = Path(shutil.copytree(saved, folder / "published")), "document_0_Transformer"
    for file in (published / inner).iterdir():
        file.rename(published / file.name)
    router = published / "router_config.json"
    router.write_text(router.read_text().replace(inner, ""))
    found = load_file(published / "model.safetensors")
    tensors = {name.replace("gte.", "new."): tensor for name, tensor in found.items()}
    sizes = {"vocab_size": WORDS, "pad_token_id": 0, "rope_theta": 160_000, "rope_scaling": None}
    return save(published, gte.CONFIG | sizes | {"architectures": ["NewForMaskedLM"]}, tensors)


def _looked_up(folder: Path) -> str:
    transformer = Transformer(str(folder / "backbone"), transformer_task="fill-mask")
    weights = torch.rand(len(transformer.tokenizer), generator=torch.Generator().manual_seed(2)) * 8
    static = SparseStaticEmbedding(transformer.tokenizer, weights, frozen=True)
    modules = [transformer, SpladePooling("max", activation_function="log1p_relu")]
    router = Router.for_query_document([static], modules, default_route="document")
    return save_own(SparseEncoder(modules=[router], device="cpu"), folder / "saved")


def modernbert(folder: Path) -> str:
    """Sparse encoders over ModernBERT, such as ibm-granite's newer ones: a decoder with a bias of its own."""
    ends = {"bos_token_id": 101, "eos_token_id": 102}
    settings = {name: each for name, each in MODERNBERT.items() if name != "global_attn_every_n_layers"}
    return _saved(_backbone(folder, "modernbert", bias=-4.5, **settings, **ends), SpladePooling("max"))


def xlm_roberta(folder: Path) -> str:
    """Sparse encoders over XLM-RoBERTa, such as OpenSearch's multilingual one."""
    size = xlm_roberta_tokenizer(folder / "backbone")
    sizes = {"max_position_embeddings": 514, "type_vocab_size": 1}
    return _saved(_backbone(folder, "xlm-roberta", size, **sizes), SpladePooling("max"))
