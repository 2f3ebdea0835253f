"""Pictures on the device: encoded by the vision tower, and their features until the sequences that have them
have run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.visual.vision import Vision
from maxsimd.engine.execution.layout import ImageRows
from maxsimd.pooling.ragged import to_device
from maxsimd.scheduler import ImageJob


class FeatureStore:
    """Owns the features [n, hidden x layers] of pictures by their ids. Used by the device thread alone."""

    def __init__(self, vision: Vision, device: torch.device) -> None:
        self._vision = vision
        self._device = device
        self._features: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def encode(self, jobs: Sequence[ImageJob]) -> None:
        """Encodes pictures together. A second time it overwrites what the first has made."""
        features = self._vision.tower([job.inputs for job in jobs], self._device)
        for job, rows in zip(jobs, features, strict=True):
            # A clone, so that one picture does not hold the memory of all that were encoded with it.
            self._features[job.image_id] = rows.clone() if len(jobs) > 1 else rows

    def put_into(self, embeddings: torch.Tensor, images: Sequence[ImageRows]) -> dict[str, Any]:
        """The backbone's inputs for a step with pictures: `inputs_embeds` [1, rows, hidden], the embeddings
        [rows, hidden] of its tokens with features in the rows of pictures; and where pictures have features
        for further layers, the mask of those rows and what is added to the states of each layer there. Raises
        KeyError for a picture that was not encoded."""
        rows = to_device(np.concatenate([image.rows for image in images]), self._device)
        parts = [
            self._features[image.image_id][image.first : image.first + len(image.rows)] for image in images
        ]
        first, *deeper = torch.cat(parts).to(embeddings.dtype).split(embeddings.shape[-1], dim=-1)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(0, rows, first.contiguous())[None]}
        if deeper:
            mask = torch.zeros(len(embeddings), dtype=torch.bool, device=self._device)
            inputs["visual_pos_masks"] = mask.index_fill(0, rows, True)[None]
            inputs["deepstack_visual_embeds"] = deeper
        return inputs

    @property
    def are_results(self) -> bool:
        """Whether a picture's feature is all that is made of it."""
        return self._vision.is_result

    def rows_of(self, image_ids: Sequence[int]) -> torch.Tensor:
        """The features [pictures, hidden] of pictures that have one each. Raises KeyError for a picture that
        was not encoded."""
        return torch.cat([self._features[image_id] for image_id in image_ids])

    def free(self, image_id: int) -> None:
        self._features.pop(image_id, None)

    def __len__(self) -> int:
        return len(self._features)
