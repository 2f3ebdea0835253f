"""How a model is named, without anything that takes long to import."""

from pathlib import Path

from maxsimd.engine.errors import ModelLoadError

# The model that is served when none is named.
EMBEDDED_MODEL = "all-MiniLM-L6-v2"


def shown_name(model: str | None) -> str:
    """The name of a model in messages; None is the embedded one."""
    return EMBEDDED_MODEL if model is None else model.rstrip("/")


def refuse_missing_folder(model: str | None) -> None:
    """Raises ModelLoadError if the name is a path, and nothing is there. Other names may be hub ids."""
    if model is None or not model.startswith(("/", "./", "../", "~")):
        return
    try:
        is_there = Path(model).exists()
    except OSError as error:
        raise ModelLoadError(f"{model!r} cannot be read: {error.strerror}; let this user read it") from error
    if not is_there:
        raise ModelLoadError(f"there is no folder {model!r}")
