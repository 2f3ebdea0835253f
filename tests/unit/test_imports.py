"""The layout stays easy to see: imports go one way, and files stay short."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["scheduler", "kernels", "pooling", "engine", "api", "bench"]
# From each room one may look down, never up; bench stands above all.
MAY_IMPORT = {room: set(ROOMS[: i + 1]) for i, room in enumerate(ROOMS)}


def _files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def _imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down_only(room: str) -> None:
    for path in _files(room):
        ours = {name.split(".")[1] for name in _imported_modules(path) if name.startswith("maxsimd.")}
        assert ours <= MAY_IMPORT[room], f"{path.relative_to(ROOT)} imports {ours - MAY_IMPORT[room]}"


def test_the_scheduler_knows_neither_torch_nor_asyncio() -> None:
    for path in _files("scheduler"):
        foreign = {name.split(".")[0] for name in _imported_modules(path)} & {
            "torch",
            "asyncio",
            "transformers",
        }
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_holds_more_than_400_lines(room: str) -> None:
    for path in _files(room):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines: split it"


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_lives_in_it(room: str) -> None:
    for path in _files(room):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
