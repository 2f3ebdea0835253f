"""Sparse encoders, as they are published."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from tests.checkpoints.cross_encoders import XLM_R
from tests.checkpoints.tokenizers import unigram, wordpiece
from tests.checkpoints.weights import SIZES, spread


def _sparse(model: Any, bias: float = -3.5) -> Any:
    """Random weights under which most words weigh nothing, and the others about as much as trained ones."""
    spread(model, embedding=0.12)
    with torch.no_grad():
        model.get_output_embeddings().bias.fill_(bias)
    return model


def _saved(folder: Path, pooling: SpladePooling, **options: Any) -> str:
    transformer = Transformer(str(folder / "backbone"), transformer_task="fill-mask")
    model = SparseEncoder(modules=[transformer, pooling], device="cpu", **options)
    model.save_pretrained(str(folder / "saved"))
    return str(folder / "saved")


def _bert(folder: Path) -> Path:
    model = _sparse(BertForMaskedLM(BertConfig(vocab_size=30522, **SIZES)))
    model.save_pretrained(folder / "backbone")
    wordpiece().save_pretrained(folder / "backbone")
    return folder


def splade(folder: Path, decoder: bool = False) -> str:
    """naver/splade-v3: BERT's masked words, the greatest weights."""
    return _written(_saved(_bert(folder), SpladePooling("max")), decoder)


def _written(path: str, decoder: bool) -> str:
    """With `decoder` the output matrix is in the file, too, as it is in pickles, though it is the input's."""
    if decoder:
        file = Path(path) / "model.safetensors"
        tensors = load_file(file)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    return path


def splade_sum(folder: Path) -> str:
    """naver/splade, the first: the sum of weights."""
    return _saved(_bert(folder), SpladePooling("sum"))


def splade_heaviest(folder: Path, decoder: bool = False) -> str:
    """A save with max_active_dims, behind prompts."""
    prompts = {"query": "query: ", "document": "passage: "}
    saved = _saved(_bert(folder), SpladePooling("max"), max_active_dims=100, prompts=prompts)
    return _written(saved, decoder)


def plain(folder: Path, decoder: bool = False) -> str:
    """naver/splade-cocondenser-ensembledistil as transformers saves it: BertForMaskedLM and nothing else."""
    return _written(str(_bert(folder) / "backbone"), decoder)


def _distilbert(folder: Path) -> Path:
    config = DistilBertConfig(vocab_size=30522, dim=128, n_layers=3, n_heads=4, hidden_dim=256)
    _sparse(DistilBertForMaskedLM(config), bias=-1.5).save_pretrained(folder / "backbone")
    wordpiece().save_pretrained(folder / "backbone")
    return folder


def opensearch_v3(folder: Path) -> str:
    """opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill: documents by DistilBERT and two
    logarithms, the words of queries looked up in a table of inverse document frequencies."""
    _distilbert(folder)
    transformer = Transformer(str(folder / "backbone"), transformer_task="fill-mask")
    weights = torch.rand(len(transformer.tokenizer), generator=torch.Generator().manual_seed(2)) * 8
    static = SparseStaticEmbedding(transformer.tokenizer, weights, frozen=True)
    router = Router.for_query_document(
        query_modules=[static],
        document_modules=[transformer, SpladePooling("max", activation_function="log1p_relu")],
        default_route="document",
    )
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(folder / "saved"))
    return str(folder / "saved")


def modernbert(folder: Path) -> str:
    """Sparse encoders over ModernBERT, such as ibm-granite's newer ones: a decoder with a bias of its own."""
    config = ModernBertConfig(
        vocab_size=30522, max_position_embeddings=512, pad_token_id=0, cls_token_id=101, sep_token_id=102,
        bos_token_id=101, eos_token_id=102, local_attention=16, **SIZES,
    )  # fmt: skip
    _sparse(ModernBertForMaskedLM(config), bias=-4.5).save_pretrained(folder / "backbone")
    wordpiece().save_pretrained(folder / "backbone")
    return _saved(folder, SpladePooling("max"))


def xlm_roberta(folder: Path) -> str:
    """Sparse encoders over XLM-RoBERTa, such as OpenSearch's multilingual one."""
    size = unigram(folder / "backbone", XLM_R, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    config = XLMRobertaConfig(vocab_size=size, max_position_embeddings=514, type_vocab_size=1, **SIZES)
    _sparse(XLMRobertaForMaskedLM(config)).save_pretrained(folder / "backbone")
    return _saved(folder, SpladePooling("max"))
