"""The command line of the programs beside this file."""

import argparse
import importlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.findings import Found
from tests.checkpoints.late_interaction import stanford

NAMES = ("faults", "poisoned", "disconnects", "stops", "idle", "fuzz", "amplify")


def main() -> int:
    # SIGTERM ends a program as Ctrl-C does, so that what it started is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seconds", type=float, help="how long, where a program goes by time")
    parser.add_argument("--requests", type=int, help="how many, where it goes by number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a checkpoint; by default a small one with random weights")
    parser.add_argument("--plot", type=Path, help="file to draw memory over time in, .svg or .png (faults)")
    parser.add_argument("--only", help="run attacks with this in their name (amplify)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="maxsimd-chaos-") as folder:
        options.model = options.model or stanford(Path(folder))
        found: Found = importlib.import_module(f"tests.chaos.{options.name}").run(options)
    print(found)
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
