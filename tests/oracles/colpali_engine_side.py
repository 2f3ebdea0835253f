"""Encodes queries and pages with colpali-engine, in that package's environment, for test_authors.py.

Reads one JSON object: the `family` (a class of colpali-engine), the `checkpoint`, `queries` and their
`suffix`, `pages` (files of pictures) and how they are written (`page`), `backend` (pil or torchvision), and
`output`, the file for token embeddings q0, q1, ..., p0, p1, ... [tokens, dimensions]."""

import json
import sys
from pathlib import Path
from typing import Any

import colpali_engine.models as published
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Qwen2VLVideoProcessor

# Starts of names of tensors, in a checkpoint and in colpali-engine. The first that fits counts; "" fits all.
_NAMES = {
    "ColPali": {"vlm.language_model.model.": "model.model.language_model.", "vlm.": "model.model.",
                "embedding_proj_layer.": "custom_text_proj."},
    "ColQwen2": {"vlm.": "", "embedding_proj_layer.": "custom_text_proj.", "model.": "language_model."},
    "ColQwen2_5": {"model.": "language_model."},
    "ColQwen3": {"model.": ""},
    "ColIdefics3": {"": "model."},
    "ColModernVBert": {"vlm.": "model.", "embedding_proj_layer.": "custom_text_proj."},
}  # fmt: skip


def main() -> None:
    order = json.load(sys.stdin)
    folder = Path(order["checkpoint"])
    model = _model(order["family"], folder)
    processor = _processor(order["family"], folder, order["backend"])
    if order["page"] is not None:
        processor.visual_prompt_prefix = order["page"]
    arrays = {}
    with torch.inference_mode():
        for i, text in enumerate(order["queries"]):
            query = processor.process_queries([text], suffix=order["suffix"])
            arrays[f"q{i}"] = model(**query)[0].numpy()
        for i, path in enumerate(order["pages"]):
            with Image.open(path) as page:
                arrays[f"p{i}"] = model(**processor.process_images([page]))[0].numpy()
    np.savez(order["output"], **arrays)


def _model(family: str, folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "vlm_config", config)
    model = getattr(published, family)(config)
    tensors = {_name(family, name): each for name, each in load_file(folder / "model.safetensors").items()}
    projection = "linear" if family == "ColIdefics3" else "custom_text_proj"
    for path in folder.glob("*_Dense/model.safetensors"):  # sentence-transformers' copy of the projection
        tensors |= {name.replace("linear", projection): each for name, each in load_file(path).items()}
    dimensions, hidden = tensors[f"{projection}.weight"].shape
    setattr(model, projection, torch.nn.Linear(hidden, dimensions))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # Heads that words are generated with, which embeddings do not need.
    left = {name for name in missing if "lm_head" not in name}
    assert not left, f"not in the checkpoint: {sorted(left)}"
    assert not unexpected, f"not in colpali-engine's class: {unexpected}"
    return model.eval()


def _name(family: str, name: str) -> str:
    for begin, replacement in _NAMES[family].items():
        if name.startswith(begin):
            return replacement + name.removeprefix(begin)
    return name


def _processor(family: str, folder: Path, backend: str) -> Any:
    kind = getattr(published, {"ColQwen2_5": "ColQwen2_5_Processor"}.get(family, f"{family}Processor"))
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend=backend),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
    }
    if family.startswith("ColQwen"):  # it wants one, and nothing here is a video
        parts["video_processor"] = Qwen2VLVideoProcessor()
    settings = folder / "processor_config.json"
    if settings.exists() and "image_seq_len" in (read := json.loads(settings.read_text())):
        parts["image_seq_len"] = read["image_seq_len"]
    return kind(**parts)


if __name__ == "__main__":
    main()
