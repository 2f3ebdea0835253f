"""The parts that handlers are made of, one by one: imports, keys, errors, reading; no engine runs here."""

import ast
from pathlib import Path

import pytest

import maxsimd.api
from maxsimd.api.config import ServerConfig
from maxsimd.api.failures import as_api_error, error_answer
from maxsimd.api.keys import has_valid_key, read_keys
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, InvalidRequestError

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


def test_only_the_adapter_and_the_servers_life_import_aiohttp() -> None:
    files = sorted(API.rglob("*.py"))
    assert {str(path.relative_to(API)) for path in files if "aiohttp" in _imports(path)} == {
        "app.py",
        "serve.py",
    }
    reaching = {"maxsimd.api.app", "maxsimd.api.serve"}
    inner = [path for path in files if path.name not in ("app.py", "serve.py", "cli.py")]
    assert not [path for path in inner if _imports(path) & reaching]


def test_keys_come_from_options_and_from_a_file_with_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n  three \n\n   \nfo ur\n")
    assert read_keys(ServerConfig(api_key=("one",), api_key_file=str(file))) == {
        "one",
        "two",
        "three",
        "fo ur",
    }
    assert read_keys(ServerConfig()) == frozenset()
    file.write_text(" \n\n")
    assert read_keys(ServerConfig(api_key=("one",), api_key_file=str(file))) == {"one"}


def test_a_file_without_keys_does_not_open_the_server_to_all(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(" \n\n")
    with pytest.raises(ValueError, match="keys holds no key"):
        ServerState(Engine(), ServerConfig(api_key_file=str(file)))


def test_keys_may_hold_any_character() -> None:
    assert has_valid_key("Bearer schlüssel", frozenset({"schlüssel"}))
    assert not has_valid_key("Bearer \udcff", frozenset({"schlüssel"}))
    assert has_valid_key("Bearer o ne", frozenset({"o ne"}))
    assert not has_valid_key("Bearer one", frozenset())


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER  one "])
def test_the_scheme_may_be_in_any_case_with_any_number_of_spaces(header: str) -> None:
    assert has_valid_key(header, frozenset({"one", "two"}))
    assert not has_valid_key(header, frozenset({"three"}))


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer one two", "Basic one", "one Bearer"])
def test_nothing_but_a_bearer_token_is_a_key(header: str) -> None:
    assert not has_valid_key(header, frozenset({"one", "two"}))


def test_an_answer_may_be_retried_only_where_that_helps() -> None:
    assert "Retry-After" not in error_answer(as_api_error(InvalidRequestError("x"))).headers
