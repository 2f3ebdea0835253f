"""Code blocks run as they stand; those that need a client, and quickstart.md's, are run elsewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from tests.forked import Program

ROOT = Path(__file__).parents[2]
BESIDE_DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> list[Block]:
    whole = page.read_text(encoding="utf-8")
    return [
        Block(page, whole.count("\n", 0, found.start()) + 1, found["language"], found["text"])
        for found in _FENCE.finditer(whole)
    ]


_BLOCKS = [block for page in (*BESIDE_DOCS, *sorted(ROOT.glob("docs/**/*.md"))) for block in _blocks(page)]
_NEED_CLIENTS = ("clients.md", "rag.md", "databases.md", "batch-jobs.md", "grpc.md")
_OF_CLIENTS = {ROOT / "docs" / name for name in _NEED_CLIENTS}


def blocks_of(language: str) -> list[Block]:
    return [block for block in _BLOCKS if block.language == language and block.page not in _OF_CLIENTS]


def _commands(program: str) -> list[str]:
    """All lines of shell blocks that call a program, without what follows a pipe."""
    lines = []
    for block in _BLOCKS:
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(rf"(\.venv/bin/)?{program}\b", line):
                    lines.append(line)
    return lines


def _on_ray(block: Block) -> bool:
    return re.search(r"^import ray$", block.text, flags=re.MULTILINE) is not None


@pytest.mark.parametrize("block", [each for each in blocks_of("python") if not _on_ray(each)], ids=str)
def test_python_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(block.text, encoding="utf-8")
    Program([], script).run()


@pytest.mark.ray
@pytest.mark.exhaustive
def test_python_on_ray_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script, environment = tmp_path / "shown.py", os.environ | {"HF_HUB_OFFLINE": "1"}
    for block in filter(_on_ray, blocks_of("python")):
        script.write_text(block.text, encoding="utf-8")
        subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, check=True, timeout=600)


def test_json_and_yaml_can_be_read(tmp_path: Path) -> None:
    assert all(json.loads(block.text) for block in _BLOCKS if block.language == "json")
    file = tmp_path / "maxsimd.yaml"
    for block in _BLOCKS:
        if block.language != "yaml" or "apiVersion:" in block.text:  # it is for Kubernetes
            continue
        file.write_text(block.text, encoding="utf-8")
        found = CliRunner().invoke(main, ["serve", "--config", str(file), "--print-config"])
        assert found.exit_code == 0, f"{block}: {found.output}"


def test_commands_and_targets_are_those_that_are_shown() -> None:
    for line in _commands("maxsimd"):
        words = shlex.split(line, comments=True)[1:]
        command: click.Command = main
        context = click.Context(main, info_name="maxsimd")
        while isinstance(command, click.Group):
            name = words.pop(0)
            found = command.get_command(context, name)
            assert found is not None, f"there is no command {name}"
            command, context = found, click.Context(found, info_name=name, parent=context)
        try:
            command.make_context(command.name, words, parent=context.parent)
        except click.BadParameter as error:
            if "does not exist" not in str(error):
                raise
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for line in _commands("make"):
        words = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
        assert words
        assert set(words) <= targets, line
