"""Tests of the imports of the server's modules."""

import ast
from pathlib import Path

import maxsimd.api

API = Path(maxsimd.api.__file__).parent


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
            if node.module == "maxsimd.api":
                names |= {f"maxsimd.api.{alias.name}" for alias in node.names}
            names.add(node.module)
    return names


def test_only_modules_that_use_sockets_import_aiohttp() -> None:
    files = sorted(API.rglob("*.py"))
    outer = {"app", "connections", "listener", "responses", "serve", "media/addresses", "media/fetching"}
    assert {str(path.relative_to(API)) for path in files if "aiohttp" in _imports(path)} == {
        f"{name}.py" for name in outer
    }
    reaching = {f"maxsimd.api.{name.replace('/', '.')}" for name in outer}
    starting = {"cli", "process"}
    inner = [path for path in files if path.stem not in outer | starting and path.parent.name != "media"]
    assert not [path for path in inner if _imports(path) & reaching]
