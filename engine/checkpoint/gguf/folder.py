"""A GGUF file as the folder that its model is published as: a config, a tokeniser, sentence-transformers'
modules. The weights stay in the file and are handed to transformers when it loads the model."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.direction import config_says_both_ways
from maxsimd.engine.checkpoint.gguf.container import GgufFile
from maxsimd.engine.checkpoint.gguf.families import ANSWERS, Config, Family, family_of
from maxsimd.engine.checkpoint.gguf.tensors import read_tensors, refuse_unnamed
from maxsimd.engine.checkpoint.gguf.tokenizer import write_tokenizer
from maxsimd.engine.checkpoint.stored import StoredWeights
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

_ENDING = ".gguf"
_RANK = 4
# llama.cpp's ways of pooling by their numbers, in the words of sentence-transformers.
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_MODULES = "modules.json"
# Files beside it that say how the model is used.
_SAYING_HOW = (_MODULES, "config_sentence_transformers.json", "sentence_bert_config.json")


@contextmanager
def from_gguf(model: str) -> Iterator[tuple[str, StoredWeights | None]]:
    """The path to load a checkpoint from: its own, or for a GGUF file, or a folder that has one and no other
    weights, a temporary folder; and then the weights. Raises ModelLoadError for a file that is not read."""
    path = _file_of(model)
    if path is None:
        yield model, None
        return
    file = GgufFile(path)
    with tempfile.TemporaryDirectory(prefix="maxsimd-") as folder:
        stored = _lay_out(file, Path(folder))
        try:
            yield folder, stored
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(folder, model)) from error


def _file_of(model: str) -> Path | None:
    path = Path(model)
    if path.suffix == _ENDING:
        if not path.is_file():
            raise ModelLoadError(f"there is no file {model!r}")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    found = sorted(path.glob(f"*{_ENDING}"))
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:4])
        raise ModelLoadError(f"{model!r} has {len(found)} GGUF files ({names}); name one of them")
    return found[0] if found else None


def _lay_out(file: GgufFile, folder: Path) -> StoredWeights:
    """Writes all but the weights into a folder."""
    family = family_of(file)
    pooling = file.setting("pooling_type")
    used_as_beside = (file.path.parent / _MODULES).is_file()
    # Of an encoder nothing is left but its states; a decoder has an output layer, if only its embeddings.
    embeds = used_as_beside or pooling in _POOLING
    config = _config(file, family, pooling, embeds)
    _check_beside(file)
    refuse_unnamed(file, family)
    file.refuse_unread()
    write_tokenizer(file, folder, needs_end=pooling == 3 and not used_as_beside)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if used_as_beside:
        _link_modules(file.path.parent, folder)
    elif embeds:
        _write_modules(folder, _POOLING[pooling], config["hidden_size"])
        log.info("%s pools %s; it says of no prompts: give query_prompt if there is one", file.path, pooling)
    return StoredWeights(partial(read_tensors, file, family, config), file.form)


def _check_beside(file: GgufFile) -> None:
    """Raises ModelLoadError for a model of which the config.json beside it says what the file cannot say."""
    beside = file.path.parent / "config.json"
    if beside.is_file() and config_says_both_ways(json.loads(beside.read_text(encoding="utf-8"))):
        raise ModelLoadError(
            f"the config.json beside {file.path} says that the model reads in both directions, which is not "
            "carried out for GGUF files; name the model in safetensors"
        )


def _config(file: GgufFile, family: Family, pooling: Any, embeds: bool) -> Config:
    """The config of the checkpoint. Raises ModelLoadError for an encoder that does not say how it pools."""
    config = _with_tokens(file, family.config(file))
    labels = file.setting("classifier.output_labels")
    if embeds:
        return config | {"architectures": [family.backbone]}
    if family.causal:
        return config | {"architectures": [family.whole], "tie_word_embeddings": _is_tied(file, config)}
    if pooling != _RANK:
        raise ModelLoadError(
            f"{file.path} does not say how it pools (pooling_type is {pooling}); put the {_MODULES} of the "
            "model that it was made from beside it, with the folders that it names"
        )
    answers = file.names.get(f"{ANSWERS}.weight")
    if not family.whole or answers is None:
        raise ModelLoadError(
            f"{file.path} is to rank, but the conversion has left out a part of its classifier; name the "
            "checkpoint that it was made from"
        )
    names = labels if labels and len(labels) == answers[0] else [f"LABEL_{i}" for i in range(answers[0])]
    return config | {
        "architectures": [family.whole],
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _is_tied(file: GgufFile, config: Config) -> bool:
    """Whether the embeddings are the output layer, too. The rows of a reranker's answers are its own."""
    return bool(config["tie_word_embeddings"]) and f"{ANSWERS}.weight" not in file.names


def _with_tokens(file: GgufFile, config: Config) -> Config:
    found = {}
    for role, name in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        number = file.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and number < config["vocab_size"]:
            found[f"{role}_token_id"] = number
    return found | config


def _write_modules(folder: Path, pooling: str, width: int) -> None:
    """Modules that pool and normalise, as llama.cpp does with all embeddings."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / _MODULES).write_text(json.dumps(modules), encoding="utf-8")
    settings = {"word_embedding_dimension": width, "pooling_mode": pooling}
    for path, said in (("1_Pooling", settings), ("2_Normalize", {})):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(said), encoding="utf-8")


def _link_modules(source: Path, folder: Path) -> None:
    for name in _SAYING_HOW:
        if (source / name).is_file():
            (folder / name).symlink_to((source / name).resolve())
    modules = json.loads((source / _MODULES).read_text(encoding="utf-8"))
    paths = [str(module.get("path") or "") for module in modules]
    if not paths or paths[0] or any("/" in path or path == ".." for path in paths):
        raise ModelLoadError(f"{source / _MODULES} has its transformer, or another module, in another folder")
    for path in paths[1:]:
        if path and (source / path).is_dir():
            (folder / path).symlink_to((source / path).resolve())
