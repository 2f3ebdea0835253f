"""The examples of docs/clients.md and other pages, which their clients' interpreters run."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients import environments

PAGE = environments.ROOT / "docs" / "clients.md"
RAG = environments.ROOT / "docs" / "rag.md"
DATABASES = environments.ROOT / "docs" / "databases.md"
BATCH_JOBS = environments.ROOT / "docs" / "batch-jobs.md"
# The server of a page: what its examples call it, and which of ours stands for it.
URL = "http://127.0.0.1:8000"
SERVERS = {PAGE: "LATE_INTERACTION_URL", RAG: "TWO_MODELS_URL", DATABASES: "TWO_MODELS_URL",
           BATCH_JOBS: "BI_ENCODER_URL"}  # fmt: skip
# Examples with this passage ask what it answers, so they print it first.
_ANSWER = "Gustave Eiffel's company designed and built the tower."
# The client that is in no catalogue, as it needs no environment.
CURL = "curl"

_SUFFIXES = {"python": ".py", "js": ".mjs", "sh": ".sh"}
# A comment names the client, and the block of code is on the lines below. It may continue the block before.
_EXAMPLE = re.compile(r"^<!-- client: (\w+)(, continued)? -->\n```(\w+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Example:
    """A block of code: its client by name, its language as the page has it, and the line it begins on."""

    client: str
    language: str
    code: str
    line: int


def examples(client: str | None = None, page: Path = PAGE) -> list[Example]:
    """Those of one client, or of all for None, in the page's order."""
    text, found = page.read_text(encoding="utf-8"), list[Example]()
    for match in _EXAMPLE.finditer(text):
        code = (found[-1].code if match[2] else "") + match[4]
        found.append(Example(match[1], match[3], code, text.count("\n", 0, match.start(4)) + 1))
    return [example for example in found if client in (None, example.client)]


class Failed(Exception):
    """A process did not end well."""


def run(command: Sequence[str], environment: Mapping[str, str], folder: Path, seconds: float) -> str:
    try:
        ran = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(str(error)) from error
    if ran.returncode != 0:
        raise Failed(f"exit status {ran.returncode}\n{(ran.stdout + ran.stderr)[-3000:]}")
    return ran.stdout


def printed(example: Example, interpreter: str, url: str, variables: Mapping[str, str], folder: Path) -> str:
    """The output of an example that asks the server at `url`. It runs in the `folder`."""
    script = folder / f"example{_SUFFIXES[example.language]}"
    script.write_text(example.code.replace(URL, url), encoding="utf-8")
    if example.language == "js":
        # Modules are looked for beside the script.
        (folder / "node_modules").symlink_to(environments.NODE_MODULES)
    said = run([interpreter, str(script)], variables, folder, 120)
    if not said.strip():
        raise Failed("it printed nothing")
    if _ANSWER in example.code and _ANSWER not in said.splitlines()[0]:
        raise Failed(f"it does not begin with the answer:\n{said}")
    return said
