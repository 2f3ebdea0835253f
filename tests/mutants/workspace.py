"""A copy of the tree in the shape that mutmut takes: `maxsimd/` as installed, `tests/` and a configuration.

mutmut names mutants by the paths of files, so these must be the modules' names.
"""

import ast
import json
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKSPACES = ROOT / "build" / "mutants"

# mutmut leaves decorated functions alone. These decorators mean the same when called after the function.
_DECORATORS = {"property", "cached_property", "contextmanager", "asynccontextmanager", "cache"}

# Added to the tests' conftest. One failing example is enough, so no smaller one is looked for. The shortest
# tests, by the times that mutmut has noted, run first, because the first that fails ends a mutant; those of a
# file stay together, because they may share an engine that ends with the file. A test that computes far
# longer than noted fails: to a mutant that runs in circles mutmut gives the time of all tests.
_CONFTEST = """
import gc
import json
import signal
from collections import Counter
from hypothesis import Phase, settings

settings.register_profile(
    "mutants",
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],
)


def pytest_collection_modifyitems(items):
    noted = Path("mutmut-stats.json")
    if noted.exists():
        seconds = json.loads(noted.read_text())["duration_by_test"]
        of_file = Counter()
        for item in items:
            of_file[item.path] += seconds.get(item.nodeid, 0)
        items.sort(key=lambda item: (of_file[item.path], item.path, seconds.get(item.nodeid, 0)))
        for item in items:
            item.noted_seconds = seconds.get(item.nodeid)


def _runs_in_circles(signum, frame):
    pytest.fail("computes far longer than without the mutant")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    noted = getattr(item, "noted_seconds", None)
    if noted is None:
        return (yield)
    signal.signal(signal.SIGPROF, _runs_in_circles)
    signal.setitimer(signal.ITIMER_PROF, 3 + 5 * noted, 1)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def pytest_collection_finish(session):
    # The collector of each forked process leaves alone what was loaded before.
    gc.freeze()
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the source with the tests that are meant for it."""

    name: str
    do_not_mutate: list[str]
    source: list[str]
    tests: list[str]
    only: list[str] = field(default_factory=list)
    excepted: list[str] = field(default_factory=list)
    leave_out: list[str] = field(default_factory=list)

    @property
    def workspace(self) -> Path:
        return WORKSPACES / self.name.replace("/", "-")

    def modules(self) -> list[str]:
        return ["maxsimd/" + folder for folder in self.source]

    def test_files(self) -> list[str]:
        found = {str(path.relative_to(ROOT)) for pattern in self.tests for path in ROOT.glob(pattern)}
        return sorted(found)


def parts() -> dict[str, Part]:
    text = (Path(__file__).parent / "parts.toml").read_text(encoding="utf-8")
    settings: dict[str, Any] = tomllib.loads(text)
    return {name: Part(name, settings["do_not_mutate"], **part) for name, part in settings["parts"].items()}


def undecorated(source: str) -> str:
    """The same code, where decorators that hide a function from mutmut are called after it."""
    lines = source.splitlines()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in sorted(
        (node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)),
        key=lambda node: node.lineno,
        reverse=True,
    ):
        match node.decorator_list:
            case [ast.Name(id=name) as decorator] if name in _DECORATORS:
                assert node.end_lineno is not None
                lines.insert(node.end_lineno, f"{' ' * node.col_offset}{node.name} = {name}({node.name})")
                del lines[decorator.lineno - 1]
    return "\n".join(lines) + "\n"


def build(part: Part) -> Path:
    """Makes the workspace of a part anew. Returns it."""
    folder = part.workspace
    shutil.rmtree(folder, ignore_errors=True)
    left_out = shutil.ignore_patterns("__pycache__", "results", "src", "package", "typings")
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package, place in tables["tool"]["setuptools"]["package-dir"].items():
        if package.count(".") < 2:
            target = folder / package.replace(".", "/")
            shutil.copytree(ROOT / place, target, ignore=left_out, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=left_out)
    with (folder / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
        conftest.write(_CONFTEST)
    for module in part.modules():
        for path in (folder / module).rglob("*.py"):
            path.write_text(undecorated(path.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "pyproject.toml").write_text(_configuration(part, tables), encoding="utf-8")
    return folder


def _configuration(part: Part, tables: dict[str, Any]) -> str:
    pytest_options = tables["tool"]["pytest"]["ini_options"]
    # Without the plugin that collects garbage after each run, which takes longer than most tests.
    select = ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "--hypothesis-profile=mutants"]
    if part.leave_out:
        select += ["-k", " and ".join(f"not {name}" for name in part.leave_out)]
    settings = {
        "tool.mutmut": {
            "source_paths": part.modules(), "only_mutate": part.only, "do_not_mutate": part.excepted,
            "also_copy": ["maxsimd"], "pytest_add_cli_args": select,
            "pytest_add_cli_args_test_selection": part.test_files(),
            "do_not_mutate_patterns": part.do_not_mutate, "process_isolation": "forkserver",
            "track_dependencies": False, "use_git_change_detection": False,
            "timeout_multiplier": 3.0, "timeout_constant": 8.0,
        },
        "tool.pytest.ini_options": {
            name: pytest_options[name] for name in ("asyncio_mode", "markers", "filterwarnings", "addopts")
        },
    }  # fmt: skip
    return "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        for table, values in settings.items()
    )
