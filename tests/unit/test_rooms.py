"""The layout: few folders, imports that go one way, and a front door that loads little."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["scheduler", "pooling", "engine", "api", "bench"]
# Packages that are not named as their folders.
RENAMED = {"api/package": "maxsimd", "api/integrations": "maxsimd.integrations"}


def test_the_package_has_its_folders_and_import_paths() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    assert set(setuptools["package-dir"].values()) == {str(path.parent.relative_to(ROOT)) for path in modules}
    assert set(setuptools["packages"]) == set(setuptools["package-dir"])
    for package, folder in setuptools["package-dir"].items():
        assert package == RENAMED.get(folder, "maxsimd." + folder.replace("/", "."))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    paths = {tuple(each) for each in re.findall(r"from (maxsimd[\w.]*) import (\w+)", text)}
    paths |= {(each, "") for each in re.findall(r"\.\. automodule:: (maxsimd[\w.]+)", text)}
    paths |= {tuple(each.rsplit(".", 1)) for each in re.findall(r"\.\. autoclass:: (maxsimd[\w.]+)", text)}
    rerankers = {"haystack": "MaxsimdRanker", "langchain": "MaxsimdRerank", "llama_index": "MaxsimdRerank"}
    paths |= {(f"maxsimd.integrations.{name}", reranker) for name, reranker in rerankers.items()}
    # In the files that `maxsimd cluster config` writes.
    paths.add(("maxsimd.api.cluster.serve", "app_builder"))
    assert len(paths) > 20
    for module, name in paths:
        found = find_spec(module)
        assert found is not None, module
        assert found.origin is not None, module
        assert re.search(rf"\b{name}\b", Path(found.origin).read_text(encoding="utf-8")), f"{module}.{name}"


def test_new_tensors_name_their_precision() -> None:
    """While transformers creates a model, torch's default precision is the model's, for all threads."""
    made = re.compile(r"torch\.(zeros|ones|empty|rand|randn|linspace|eye|full)")
    for path in [path for room in ("engine", "pooling") for path in (ROOT / room).rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            makes = isinstance(call, ast.Call) and made.fullmatch(ast.unparse(call.func))
            if makes and path.parent.name != "models":
                of_integers = re.search(r"full\(.*(_id|_start|_NOWHERE)\b", ast.unparse(call))
                assert of_integers or any(each.arg == "dtype" for each in call.keywords), (path, call.lineno)


def test_imports_and_the_command_line_load_no_torch() -> None:
    code = """
import contextlib, io, json, sys
import maxsimd, maxsimd.scheduler, maxsimd.engine.config
from maxsimd.api.cli import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words.split())
            status = 0
        except SystemExit as left:
            status = left.code
    large = {"torch", "transformers", "sentence_transformers", "aiohttp"}
    found.append([words, status, sorted(sys.modules.keys() & large)])
print(json.dumps(found))
"""
    statuses = dict.fromkeys(("srve", "serve --prot 1", "embed --txts x"), 2) | dict.fromkeys(
        ("--help", "--version", "serve --help", "bench --help", "bench peers --help", "rerank --help"), 0
    )
    statuses |= dict.fromkeys(("eval --help", "version"), 0)
    printed = subprocess.check_output([sys.executable, "-c", code, json.dumps([*statuses])], text=True)
    assert json.loads(printed) == [[words, status, []] for words, status in statuses.items()]


def test_the_front_door_has_the_engine_and_the_version() -> None:
    import maxsimd.engine
    from maxsimd.engine.engine import Engine
    from maxsimd.engine.sync import SyncEngine

    assert (maxsimd.Engine, maxsimd.SyncEngine) == (Engine, SyncEngine)
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert maxsimd.__version__ == stated
    assert set(maxsimd.__all__) <= set(dir(maxsimd))
    assert all(getattr(maxsimd.engine, name) is not None for name in maxsimd.engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = maxsimd.Motor  # type: ignore[attr-defined]
    shown = subprocess.check_output([sys.executable, "-m", "maxsimd", "--version"], text=True)
    assert shown.startswith("maxsimd, version ")
