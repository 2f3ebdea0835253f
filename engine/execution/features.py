"""Pictures on the device: encoded by the vision tower, and their features until the sequences that have them
have run."""

from collections.abc import Sequence

import numpy as np
import torch

from maxsimd.engine.checkpoint.vision import Vision
from maxsimd.engine.execution.layout import ImageRows
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import ImageJob


class FeatureStore:
    """Owns the features [n, hidden] of pictures by their ids. Used by the device thread alone."""

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

    def put_into(self, embeddings: torch.Tensor, images: Sequence[ImageRows]) -> torch.Tensor:
        """The rows [rows, hidden] with features in the rows of pictures. Raises KeyError for a picture that
        was not encoded."""
        rows = np.concatenate([image.rows for image in images])
        parts = [
            self._features[image.image_id][image.first : image.first + len(image.rows)] for image in images
        ]
        features = torch.cat(parts).to(embeddings.dtype)
        return embeddings.index_copy(0, to_device(rows, self._device), features)

    def free(self, image_id: int) -> None:
        self._features.pop(image_id, None)

    def __len__(self) -> int:
        return len(self._features)
