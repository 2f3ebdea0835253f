"""`python -m tests.clients [NAME ...]` has clients run their checks and examples against servers."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clients import environments, page, servers
from tests.clients.catalogue import CLIENTS, Client

# Variables that the server's process needs and clients must not see, or that would send clients elsewhere.
_OURS = ("PYTHONPATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of a client; `error` is None where it passed."""

    client: str
    what: str
    error: str | None


def main() -> int:
    # SIGTERM ends this as Ctrl-C does, so that the servers are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)}; all if none is named")
    named = parser.parse_args().names
    if unknown := set(named) - set(names):
        parser.error(f"there is no client {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [client for client in CLIENTS if not named or client.name in named]
    commands = [environments.command(client.environment, client.script) for client in chosen]
    outcomes: list[Outcome] = []
    with servers.running() as urls:
        for client, command in zip(chosen, commands, strict=True):
            for outcome in (*_checks(client, command, urls), *_examples(client, urls)):
                print(_row(outcome), flush=True)
                outcomes.append(outcome)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        print(f"\n{outcome.client}: {outcome.what}\n{outcome.error}")
    print(f"\n{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _checks(client: Client, command: list[str], urls: dict[str, str]) -> list[Outcome]:
    """Runs a client's checks, if it has some, which write a line of JSON each into a file."""
    if not client.script.exists():
        return []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        environment = _environment(folder) | urls | {"CHECK_RESULTS": str(results)}
        failure = None
        try:
            page.run(command, environment, Path(folder), 600)
        except page.Failed as error:
            failure = str(error)
        lines = results.read_text().splitlines() if results.exists() else []
    outcomes = [Outcome(client.name, **json.loads(line)) for line in lines]
    if failure is not None or not outcomes:
        outcomes.append(Outcome(client.name, "all of it", failure or "there are no checks"))
    return outcomes


def _examples(client: Client, urls: dict[str, str]) -> Iterator[Outcome]:
    interpreter = environments.interpreter(client.environment)
    for shown, server in page.SERVERS.items():
        for example in page.examples(client.name, shown):
            error = None
            with tempfile.TemporaryDirectory() as folder:
                try:
                    page.printed(example, interpreter, urls[server], _environment(folder), Path(folder))
                except page.Failed as failure:
                    error = str(failure)
            yield Outcome(client.name, f"its example in docs/{shown.name}, line {example.line}", error)


def _environment(home: str) -> dict[str, str]:
    """Nothing that is ours takes part, nor anything that a client keeps at home."""
    return {name: value for name, value in os.environ.items() if name not in _OURS} | {"HOME": home}


def _row(outcome: Outcome) -> str:
    passed = "passed" if outcome.error is None else f"FAILED: {outcome.error.strip().splitlines()[-1][:160]}"
    return f"{outcome.client:28} {outcome.what:64} {passed}"


if __name__ == "__main__":
    sys.exit(main())
