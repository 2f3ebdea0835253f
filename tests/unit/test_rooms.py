"""The layout stays easy to see: few rooms, imports that go one way, short files, and a light front door."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["scheduler", "pooling", "engine", "api", "integrations", "bench"]
FOLDERS = {*ROOMS, "tests", "docs"}


def _files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, f"there is no room {room}"
    return found


def _tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def test_the_top_level_is_the_rooms() -> None:
    folders = {path.split("/")[0] for path in _tracked() if "/" in path}
    assert {folder for folder in folders if not folder.startswith(".")} == FOLDERS


_IMPORTED = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
_ASKED_FOR = re.compile(r"(?:is_package_available|find_spec|import_module)\(\s*[\"'](\w+)")


@cache
def _names_looked_up(library: str) -> set[str]:
    """The top-level modules that a library imports anywhere, or asks for by name."""
    spec = find_spec(library)
    assert spec is not None
    assert spec.origin is not None
    names: set[str] = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        names |= {*_IMPORTED.findall(text), *_ASKED_FOR.findall(text)}
    return names


@pytest.mark.parametrize("library", ["transformers", "sentence_transformers"])
def test_no_folder_has_the_name_of_a_module_that_a_library_looks_up(library: str) -> None:
    present = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert not present & (_names_looked_up(library) - {"tests"})


@pytest.mark.parametrize("library", ["transformers", "sentence_transformers"])
def test_those_names_would_be_noticed(library: str) -> None:
    assert {"torch", "transformers"} <= _names_looked_up(library)
    if library == "transformers":
        assert "kernels" in _names_looked_up(library)


def test_the_package_list_equals_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    modules = [path.parent for room in ROOMS for path in _files(room) if path.name == "__init__.py"]
    folders = {str(folder.relative_to(ROOT)) for folder in modules}
    assert set(setuptools["package-dir"].values()) == folders
    assert set(setuptools["packages"]) == set(setuptools["package-dir"])
    for package, folder in setuptools["package-dir"].items():
        expected = "maxsimd" if folder == "api/package" else "maxsimd." + folder.replace("/", ".")
        assert package == expected


def test_the_front_door_loads_no_torch() -> None:
    code = "import sys, maxsimd, maxsimd.scheduler, maxsimd.engine.config; print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(ast.literal_eval(shown))
    assert "maxsimd.engine.config" in loaded
    assert not loaded & {"torch", "transformers", "sentence_transformers", "aiohttp"}


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "srve",
        "serve --help",
        "serve --prot 1",
        "bench --help",
        "bench peers --help",
        "rerank --help",
        "eval --help",
        "embed --txts x",
        "version",
    ],
)
def test_the_command_line_says_what_there_is_without_loading_it(words: str) -> None:
    code = """
import sys
from maxsimd.api.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True)
    assert ran.returncode == (2 if words in ("srve", "serve --prot 1", "embed --txts x") else 0)
    loaded = set(ast.literal_eval(ran.stdout.splitlines()[-1]))
    assert "maxsimd.api.cli" in loaded
    assert not loaded & {"torch", "transformers", "sentence_transformers", "aiohttp"}


def test_all_that_the_bench_beside_peers_runs_has_a_name() -> None:
    from maxsimd.bench.peers import alone, names

    assert tuple(alone.ALONE) == names.ALONE


def test_the_front_door_has_the_engine_and_the_version() -> None:
    import maxsimd
    from maxsimd.engine.engine import Engine
    from maxsimd.engine.sync import SyncEngine

    assert (maxsimd.Engine, maxsimd.SyncEngine) == (Engine, SyncEngine)
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert maxsimd.__version__ == stated
    assert set(maxsimd.__all__) <= set(dir(maxsimd))
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = maxsimd.Motor  # type: ignore[attr-defined]


def test_every_public_name_of_the_engine_is_there() -> None:
    import maxsimd.engine

    for name in maxsimd.engine.__all__:
        assert getattr(maxsimd.engine, name) is not None


def test_the_package_runs_as_a_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "maxsimd", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("maxsimd, version ")


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": str(root / "tests" / "typings"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("scheduler/policy.py", "import torch"),
        ("pooling/ragged.py", "from maxsimd.engine import config"),
        ("engine/cache/store.py", "from maxsimd.engine.actors import messages"),
        ("engine/scoring/similarity.py", "from maxsimd.engine.execution import layout"),
        ("engine/engine.py", "from maxsimd.api import wire"),
    ],
)
def test_an_import_that_goes_up_is_noticed(tmp_path: Path, file: str, planted: str) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(ROOT / "tests" / "typings", tmp_path / "tests" / "typings", symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    sound = _lint_imports(tmp_path)
    assert sound.returncode == 0, sound.stdout
    changed = tmp_path / file
    changed.write_text(changed.read_text(encoding="utf-8") + f"\n{planted}\n", encoding="utf-8")
    broken = _lint_imports(tmp_path)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert "BROKEN" in broken.stdout


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_holds_more_than_400_lines(room: str) -> None:
    for path in _files(room):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines: split it"


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("room", ROOMS)
def test_no_function_has_more_than_60_lines(room: str) -> None:
    for path in _files(room):
        for function in _functions(path):
            assert function.end_lineno is not None
            # The parameters of a kernel have a line each.
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            first = function.body[0].lineno if is_kernel else function.lineno
            lines = function.end_lineno - first + 1
            assert lines <= 60, f"{path.relative_to(ROOT)}: {function.name} has {lines} lines: split it"


@pytest.mark.parametrize("room", ROOMS)
def test_no_function_has_more_than_6_parameters(room: str) -> None:
    """Keyword-only options of public functions do not count, nor do those of kernels and commands."""
    for path in _files(room):
        for function in _functions(path):
            decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
            if "jit" in decorators or "click" in decorators or "option" in decorators:
                continue
            names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            count = len([name for name in names if name not in ("self", "cls")])
            if function.name.startswith("_") and function.name != "__init__":
                count += len(function.args.kwonlyargs)
            assert count <= 6, f"{path.relative_to(ROOT)}: {function.name} has {count} parameters"


def test_few_modules_stand_directly_in_the_engine() -> None:
    assert len([path for path in (ROOT / "engine").glob("*.py") if path.name != "__init__.py"]) <= 12


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_lives_in_it(room: str) -> None:
    for path in _files(room):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
