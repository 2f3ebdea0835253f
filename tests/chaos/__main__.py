"""The command line of the programs beside this file."""

import argparse
import importlib
import signal
import sys
from dataclasses import fields
from pathlib import Path

from tests.chaos.options import Options

NAMES = ("faults", "poisoned", "disconnects", "stops", "idle", "fuzz")


def main() -> int:
    # SIGTERM ends a program as Ctrl-C does, so that what it started is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seconds", type=float, help="how long, where a program goes by time")
    parser.add_argument("--requests", type=int, help="how many, where it goes by number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="folder of a checkpoint; by default a small one with random weights")
    parser.add_argument("--samples", type=Path, help="file to write samples to, as lines of JSON (faults)")
    parser.add_argument("--plot", type=Path, help="file to draw the samples in, .svg or .png (faults)")
    parser.add_argument("--log", type=Path, help="file to write the server's log to (faults)")
    given = vars(parser.parse_args())
    program = importlib.import_module(f"tests.chaos.{given['name']}")
    status: int = program.run(Options(**{field.name: given[field.name] for field in fields(Options)}))
    return status


if __name__ == "__main__":
    sys.exit(main())
