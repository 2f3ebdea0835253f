"""50 scorers killed under clients, and 100,000 rows while actors and the command are killed: `python -m
tests.cluster.soak --out FILE` writes both tables."""

import argparse
import sys
from pathlib import Path

from tests.cluster import kills, soak_rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="A Markdown file.")
    options = parser.parse_args()
    of_kills, kills_are_right = kills.soak(options.kills, options.seed)
    print(of_kills, flush=True)
    of_rows, rows_are_right = soak_rows.soak(options.rows, 1_000, options.seed)
    print(of_rows)
    if options.out is not None:
        options.out.write_text(
            "# What was lost while processes were killed, on Ray\n\n"
            f"`make soak-cluster`, seed {options.seed}: late interaction, the embedded model, float32.\n\n"
            "`maxsimd cluster serve`, two scorers, eight clients with requests of up to 24 documents:\n\n"
            f"{of_kills}\n\n"
            f"`maxsimd cluster score`, two actors:\n\n{of_rows}\n",
            encoding="utf-8",
        )
    return int(not (kills_are_right and rows_are_right))


if __name__ == "__main__":
    sys.exit(main())
