"""Token classifiers, `*ForTokenClassification`, as transformers saves them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from tests.checkpoints import cross_encoders
from tests.checkpoints.weights import spread

# The tags of CoNLL-2003, some of them; and a label without a prefix.
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")

_TEXT = "Sarah Parker lives in New York, not in London, and a file is opened: 2,100,000 words."


def labeled(folder: Path, like: str = "bert") -> str:
    """dslim/bert-base-NER, or the family of another builder of cross-encoders."""
    getattr(cross_encoders, like)(folder)
    config = AutoConfig.from_pretrained(folder)
    config.id2label = dict(enumerate(LABELS))
    config.label2id = {label: i for i, label in enumerate(LABELS)}
    model = spread(AutoModelForTokenClassification.from_config(config))
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    (last,) = [layer for layer in layers if layer.out_features == len(LABELS)]
    read = AutoTokenizer.from_pretrained(folder)(_TEXT, return_tensors="pt")
    with torch.no_grad():  # no label is likelier than others
        last.weight *= 4
        last.bias -= model(input_ids=read["input_ids"]).logits.mean(dim=(0, 1))
    model.save_pretrained(folder)
    return str(folder)


def roberta(folder: Path) -> str:
    """Jean-Baptiste/roberta-large-ner-english: offsets without the spaces before words."""
    labeled(folder, like="roberta")
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=True)
    tokenizer.save(str(path))
    return str(folder)
