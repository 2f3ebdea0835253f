"""Runs mutmut on parts and prints what the tests meant for each have noticed."""

import argparse
import os
import time

from tests.mutants import report, workspace


def main() -> None:
    parts = workspace.parts()
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; all if none is named")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    summaries = []
    for name in options.parts or parts:
        part = parts[name]
        if not part.test_files():
            summaries.append(f"{name:20} no tests: {', '.join(part.tests)} match nothing")
            continue
        begun = time.monotonic()
        report.run(workspace.build(part), options.workers)
        result = report.read(name, part.workspace)
        file = part.workspace.with_suffix(".txt")
        file.write_text(result.text(), encoding="utf-8")
        minutes = (time.monotonic() - begun) / 60
        summaries.append(f"{result.summary()}  ({minutes:.1f} min, {file.relative_to(workspace.ROOT)})")
        print(summaries[-1], flush=True)
    print("\n".join(["", *summaries]))


if __name__ == "__main__":
    main()
