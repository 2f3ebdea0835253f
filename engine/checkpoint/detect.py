"""Finds out what a checkpoint is from its files alone, before anything heavy is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The small files that say what a checkpoint is."""

    config: dict[str, Any]
    sentence_transformers: dict[str, Any]
    modules: list[dict[str, Any]]

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["unknown"])[0])


def read_files(model: str, revision: str | None) -> CheckpointFiles:
    """Reads them from a folder or the hub. Raises ModelLoadError when there is no checkpoint."""
    config = _read_json(model, "config.json", revision)
    modules = _read_json(model, "modules.json", revision)
    if config is None and modules is None:
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is neither a config.json nor a modules.json; "
            "name a folder that has one, or a hub id that this machine can reach"
        )
    if config is None:  # newer sentence-transformers saves keep it in the first module's folder
        path = (modules or [{}])[0].get("path", "")
        config = _read_json(model, f"{path}/config.json", revision)
    return CheckpointFiles(
        config or {}, _read_json(model, "config_sentence_transformers.json", revision) or {}, modules or []
    )


def detect_score_type(files: CheckpointFiles) -> ScoreType:
    """What the checkpoint says of itself; a plain encoder is a bi-encoder."""
    declared = files.sentence_transformers.get("model_type")
    if declared in ("MultiVectorEncoder", "ColBERT") or "HF_ColBERT" in files.architecture:
        return ScoreType.LATE_INTERACTION
    if declared == "CrossEncoder" or files.architecture.endswith("ForSequenceClassification"):
        return ScoreType.CROSS_ENCODER
    return ScoreType.BI_ENCODER


def _read_json(model: str, name: str, revision: str | None) -> Any:
    if Path(model).is_dir():
        path = Path(model) / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    from transformers.utils import cached_file

    try:
        cached = cached_file(
            model,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=True,
        )
    except OSError as error:
        raise ModelLoadError(f"cannot read {name} of {model!r}: {error}") from error
    return json.loads(Path(cached).read_text(encoding="utf-8")) if cached else None
