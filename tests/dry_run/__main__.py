"""Prints what a step of every model costs on a GPU; with --write, holds the tests to it."""

import sys
import tempfile
from pathlib import Path

from tests.dry_run.driving import HELD, measure_all, table_of

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        table = table_of(measure_all(Path(folder)))
    print(table, end="")
    if "--write" in sys.argv[1:]:
        HELD.write_text(table, encoding="utf-8")
