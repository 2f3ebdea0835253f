"""Pages, and what the libraries of models that read pictures make of them, one by one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from transformers import AutoModel, AutoProcessor, ColModernVBertForRetrieval

from maxsimd.engine.scoring.maxsim import EMPTY_DOCUMENT_SCORE
from tests.checkpoints import two_towers, vision_language, visual
from tests.parity.changes import Build
from tests.parity.references import JinaM0, loaded


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


QUERIES = ["What is this?", "a", "how many revenues were there in 1998", "Größe der Straße?"]
PAGES = [noise(70, 90), noise(56, 56, 1), noise(300, 20, 2), noise(1, 1, 3), noise(640, 480, 4)]


class Encoder:
    """A model of sentence-transformers that makes vectors. Of `bare` ones texts are written as queries."""

    def __init__(self, path: str, kind: type[Any] = MultiVectorEncoder, bare: bool = False) -> None:
        self.model, self._bare = loaded(kind, path), bare

    def vectors(self, item: Any, role: str, **options: Any) -> NDArray[Any]:
        if self._bare:
            role = "query" if isinstance(item, str) else "document"
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        return np.atleast_2d(np.asarray(encode([item], **options)[0]))

    def compared(self, query: NDArray[Any], document: NDArray[Any]) -> float:
        return maxsim(query, document)

    def score(self, query: Any, document: Any) -> float:
        return self.compared(self.vectors(query, "query"), self.vectors(document, "document"))

    def tokens(self, query: Any, document: Any) -> tuple[int, int]:
        prompt = self.model.prompts.get("query") or None
        asked = self.model[0].preprocess([query], prompt=prompt, task="query")["input_ids"]
        return asked.numel(), self.model[0].preprocess([document], task="document")["input_ids"].numel()


# ColPali and ColQwen2 as transformers saves them.
Bare = partial(Encoder, bare=True)
Embedder = partial(Encoder, kind=SentenceTransformer)


class ColModernVBert(Encoder):
    """transformers' class: sentence-transformers hands it texts and pictures without what belongs to them."""

    def __init__(self, path: str) -> None:
        self._model = ColModernVBertForRetrieval.from_pretrained(path).eval()
        self._processor = AutoProcessor.from_pretrained(path, backend="pil")

    @torch.inference_mode()
    def vectors(self, item: Any, role: str, **options: Any) -> NDArray[Any]:
        is_text = isinstance(item, str)
        process = self._processor.process_queries if is_text else self._processor.process_images
        rows: NDArray[Any] = self._model(**process([item])).embeddings[0].numpy()
        return rows


class TwoTowers(Encoder):
    """transformers' own class and processor, used as the model cards do."""

    def __init__(self, path: str) -> None:
        self._processor = AutoProcessor.from_pretrained(path, backend="pil")
        self._model = AutoModel.from_pretrained(path).eval()
        self._padding: Any = "max_length" if self._model.config.model_type == "siglip" else False

    @torch.inference_mode()
    def vectors(self, item: Any, role: str, **options: Any) -> NDArray[Any]:
        if isinstance(item, str):
            inputs = self._processor(text=[item], return_tensors="pt", padding=self._padding, max_length=24)
            rows = self._model.get_text_features(**inputs)
        else:
            rows = self._model.get_image_features(**self._processor(images=[item], return_tensors="pt"))
        vector: NDArray[Any] = rows.pooler_output.numpy()
        return vector

    def compared(self, query: NDArray[Any], document: NDArray[Any]) -> float:
        return float(query[0] @ document[0] / np.linalg.norm(query) / np.linalg.norm(document))


class Pairs:
    """A CrossEncoder, before the sigmoid, by which random weights would look alike."""

    def __init__(self, path: str) -> None:
        self._model = loaded(CrossEncoder, path)

    def score(self, query: Any, document: Any, prompt: str | None = None) -> float:
        scores = self._model.predict([(query, document)], prompt=prompt, activation_fn=lambda each: each)
        return float(scores[0])

    def tokens(self, query: Any, document: Any) -> tuple[int, int]:
        return 0, self._model[0].preprocess([(query, document)])["input_ids"].numel()


def maxsim(query: NDArray[Any], document: NDArray[Any]) -> float:
    if not document.size:  # a text, where only pictures are scored
        return EMPTY_DOCUMENT_SCORE
    return float((query @ document.T).max(axis=1).sum())


@dataclass(frozen=True, eq=False)
class PictureModel:
    """A small model's builder, and a reference that scores as its library does. Documents of `mixed` ones may
    have texts and pictures; `chunked` ones read them in several steps."""

    build: Build
    reference: Callable[[str], Any]
    mixed: bool = False
    chunked: bool = False
    exhaustive: bool = False

    @property
    def is_late(self) -> bool:
        return not self.is_pair and self.reference not in (TwoTowers, Embedder)

    @property
    def is_pair(self) -> bool:
        return self.reference in (Pairs, JinaM0)


MODELS = [
    PictureModel(visual.colpali, Bare),
    PictureModel(visual.colqwen2, Bare, chunked=True, exhaustive=True),
    PictureModel(visual.colmodernvbert, ColModernVBert, exhaustive=True),
    PictureModel(vision_language.colqwen2_merged, Encoder, mixed=True, chunked=True),
    PictureModel(vision_language.colqwen2_5, Encoder, mixed=True, chunked=True, exhaustive=True),
    PictureModel(vision_language.colqwen3, Encoder, mixed=True, chunked=True, exhaustive=True),
    PictureModel(vision_language.colqwen3_of_pictures, Encoder, mixed=True, chunked=True, exhaustive=True),
    PictureModel(vision_language.colsmol, Encoder, mixed=True, chunked=True),
    PictureModel(vision_language.qwen3_vl_embedding, Embedder, mixed=True, chunked=True),
    PictureModel(two_towers.clip, TwoTowers),
    PictureModel(two_towers.clip_saved, Embedder, exhaustive=True),
    PictureModel(two_towers.siglip, TwoTowers),
    PictureModel(vision_language.qwen3_vl_reranker, Pairs, mixed=True, chunked=True),
    PictureModel(vision_language.jina_reranker_m0, JinaM0, chunked=True),
]
