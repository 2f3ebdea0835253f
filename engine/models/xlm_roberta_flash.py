"""XLM-RoBERTa with learned positions under the names of jinaai/xlm-roberta-flash-implementation
(jina-reranker-v2): transformers' layers, and what its tensors are called there.
"""

from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification, XLMRobertaModel
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming


class XLMRobertaFlashConfig(XLMRobertaConfig):
    """transformers' own, by another name."""

    model_type = "xlm_roberta_flash"


class XLMRobertaFlashModel(XLMRobertaModel):
    """transformers' own, by another name."""

    config: XLMRobertaFlashConfig
    config_class = XLMRobertaFlashConfig


class XLMRobertaFlashForSequenceClassification(XLMRobertaForSequenceClassification):
    """transformers' own, by another name."""

    config: XLMRobertaFlashConfig
    config_class = XLMRobertaFlashConfig


CONFIG = XLMRobertaFlashConfig
MODEL = XLMRobertaFlashModel
CLASSIFIER = XLMRobertaFlashForSequenceClassification
CONVERSIONS = [
    WeightRenaming(r"emb_ln", r"embeddings.LayerNorm"),
    WeightRenaming(r"encoder\.layers", r"encoder.layer"),
    WeightRenaming(r"mixer\.out_proj", r"attention.output.dense"),
    WeightRenaming(r"norm1", r"attention.output.LayerNorm"),
    WeightRenaming(r"mlp\.fc1", r"intermediate.dense"),
    WeightRenaming(r"mlp\.fc2", r"output.dense"),
    WeightRenaming(r"norm2", r"output.LayerNorm"),
    WeightConverter(
        source_patterns=["mixer.Wqkv"],
        target_patterns=["attention.self.query", "attention.self.key", "attention.self.value"],
        operations=[Chunk(dim=0)],
    ),
]
