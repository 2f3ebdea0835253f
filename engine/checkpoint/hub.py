"""Files of checkpoints on the hub.

The hub is asked once a load whether it has the checkpoint, with a short timeout: its client retries file
requests for seconds, and has no timeout for resolving names."""

import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maxsimd.engine.errors import ModelLoadError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

log = logging.getLogger(__name__)

# How long a hub may take to say which files a checkpoint has: each step of its client's, and all together.
_ASKING_SECONDS, _MOST_ASKING_SECONDS = 5.0, 8.0
# How long an answer, or a failure, is remembered: about as long as a load takes. A failure is remembered
# longer if the checkpoint is cached.
_REMEMBERED_SECONDS, _REMEMBERED_CACHED_SECONDS = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """The hub's answer, valid until `until` (time.monotonic). `files` is None if the hub could not be asked,
    and `reason` says why."""

    until: float
    files: frozenset[str] | None
    reason: str


_asked: dict[tuple[str, str, str | None], _Asked] = {}
_lock = threading.Lock()
# Whether this module has put the client offline, because the hub could not be reached.
_went_offline = False


def find_on_hub(model: str, name: str, revision: str | None) -> Path | None:
    """The path of a file of a hub's checkpoint, from the local cache where the hub cannot be reached; None
    when the checkpoint has no such file. Raises ModelLoadError when it is neither on the hub nor cached."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    if constants.HF_HUB_CACHE.startswith("~"):
        raise ModelLoadError(
            f"{model!r} is not a folder; files from {constants.ENDPOINT} cannot be stored: this user has no "
            "home folder; set HOME or HF_HOME to a writable folder"
        )
    try:
        said = _ask(constants.ENDPOINT, model, revision)
        if said.files is None:
            found = try_to_load_from_cache(model, name, revision=revision)
            if isinstance(found, str):
                return Path(found)
            if _is_cached(model, revision):
                return None
            raise ModelLoadError(
                f"no checkpoint at {model!r}: there is no such folder, it is not in the local cache, and "
                f"{said.reason}; name a folder, or download it elsewhere with `maxsimd download` and serve "
                "that folder with offline=True"
            )
        if name not in said.files:
            return None
        return Path(hf_hub_download(model, name, revision=revision, etag_timeout=_ASKING_SECONDS))
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(f"cannot download {name} of {model!r}: {_one_line(error)}") from error
    except EntryNotFoundError:
        return None
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model!r} is gated on {constants.ENDPOINT}: ask for access there, and set HF_TOKEN to a "
            f"token of an account that has it ({_one_line(error)})"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is no such folder, and it is no hub id ({_one_line(error)})"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {name} of {model!r}: {_one_line(error)}") from error


def _ask(endpoint: str, model: str, revision: str | None) -> _Asked:
    """Asks the hub for the checkpoint's files. Raises ModelLoadError if the hub has no such checkpoint, and
    GatedRepoError for a gated one."""
    key = (endpoint, model, revision)
    with _lock:
        said = _asked.get(key)
        if said is None or time.monotonic() > said.until:
            said = _asked[key] = _ask_now(endpoint, model, revision)
        return said


def _ask_now(endpoint: str, model: str, revision: str | None) -> _Asked:
    global _went_offline
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if _went_offline and not os.environ.get("HF_HUB_OFFLINE"):
        constants.HF_HUB_OFFLINE = _went_offline = False
    if constants.HF_HUB_OFFLINE:
        return _asked_now(None, "no hub is asked (offline=True, or HF_HUB_OFFLINE)")
    try:
        info = _info(model, revision)
    except (GatedRepoError, HFValidationError):
        raise
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model!r} has no revision {revision!r} on {endpoint}") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is no such folder, and {endpoint} has no such model or it is "
            "private; check the name, set HF_TOKEN for a private one, or serve a folder with offline=True"
        ) from error
    except Exception as error:
        # The client passes on what its HTTP library raises, which changes from version to version. Other
        # libraries that read the checkpoint would ask the hub again.
        constants.HF_HUB_OFFLINE = _went_offline = True
        what = "answers with an error" if isinstance(error, HfHubHTTPError) else "cannot be reached"
        reason = f"{endpoint} {what} ({_one_line(error) or type(error).__name__})"
        if not _is_cached(model, revision):
            return _asked_now(None, reason)
        log.warning("%s; %s is read from the local cache. With offline=True no hub is asked", reason, model)
        return _asked_now(None, reason, _REMEMBERED_CACHED_SECONDS)
    return _asked_now(frozenset(file.rfilename for file in info.siblings or ()))


def _asked_now(
    files: frozenset[str] | None, reason: str = "", seconds: float = _REMEMBERED_SECONDS
) -> _Asked:
    return _Asked(time.monotonic() + seconds, files, reason)


def _info(model: str, revision: str | None) -> "ModelInfo":
    """Returns the hub's record of a checkpoint. Raises its client's errors, and TimeoutError."""
    from huggingface_hub import HfApi

    info: Future[ModelInfo] = Future()

    def ask() -> None:
        try:
            info.set_result(HfApi().model_info(model, revision=revision, timeout=_ASKING_SECONDS))
        except Exception as error:
            info.set_exception(error)

    # The client has no timeout for resolving a name; a thread that is stuck there is left behind.
    threading.Thread(target=ask, name="maxsimd-hub", daemon=True).start()
    try:
        return info.result(_MOST_ASKING_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {_MOST_ASKING_SECONDS:g} s") from error


def _is_cached(model: str, revision: str | None) -> bool:
    """Whether some file that every checkpoint has is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "modules.json", "adapter_config.json")
    return any(isinstance(try_to_load_from_cache(model, name, revision=revision), str) for name in names)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
