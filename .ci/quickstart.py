"""Follows docs/quickstart.md word for word, in a copy of the checkout that has no environment yet.

What the page marks for the first terminal runs until the end, the rest is run beside it, block by block, and
must find Paris. The page's address must be free."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = ("127.0.0.1", 8000)
# Setting up the environment downloads torch.
READY_SECONDS, BLOCK_SECONDS = 900, 180
EXPECTED = "Paris is the capital of France."
_BLOCK = re.compile(r"^<!-- (first|second) terminal -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def require(met: bool, complaint: str) -> None:
    if not met:
        raise SystemExit(f"quickstart: {complaint}")


def copy(folder: Path) -> Path:
    """The checkout as it is now, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def is_ready() -> bool:
    try:
        with urllib.request.urlopen("http://{}:{}/ready".format(*ADDRESS), timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not is_ready():
        running = process.poll() is None and time.monotonic() < deadline
        require(running, f"the server did not become ready:\n{log.read_text(encoding='utf-8')[-5000:]}")
        time.sleep(0.5)


def main() -> None:
    blocks = _BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))
    first = [text for terminal, text in blocks if terminal == "first"]
    second = [text for terminal, text in blocks if terminal == "second"]
    require(
        len(first) == 1 and len(second) > 3,
        f"{len(first)} and {len(second)} blocks: what has become of the page?",
    )
    with socket.socket() as probe:
        require(probe.connect_ex(ADDRESS) != 0, f"{ADDRESS} is taken; the page's commands need it")
    begun = time.monotonic()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "MAKE"))
    }
    with tempfile.TemporaryDirectory(prefix="maxsimd-quickstart-") as name:
        checkout, log = copy(Path(name) / "maxsimd"), Path(name) / "log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                ["sh", "-ec", first[0]],
                cwd=checkout,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            wait_until_ready(server, log)
            ready = time.monotonic()
            for text in second:
                run = subprocess.run(
                    ["sh", "-ec", text],
                    cwd=checkout,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=BLOCK_SECONDS,
                    check=False,
                )
                said = run.stdout + run.stderr
                require(run.returncode == 0 and EXPECTED in run.stdout, f"this failed:\n{text}\n{said}")
        finally:
            # Ctrl-C in the first terminal.
            os.killpg(server.pid, signal.SIGINT)
            server.wait(timeout=60)
    print(
        f"the quickstart works: ready after {ready - begun:.0f} s, tried in {time.monotonic() - ready:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
