"""Runs the checks of a file, its public functions, in the environment of its client: `python run.py FILE`.
Each writes a line of JSON to the file CHECK_RESULTS."""

import inspect
import json
import os
import runpy
import sys
import traceback


def main() -> None:
    script = sys.argv[1]
    with open(os.environ["CHECK_RESULTS"], "a", encoding="utf-8") as results:
        for name, check in runpy.run_path(script).items():
            if not inspect.isfunction(check) or check.__code__.co_filename != script or name.startswith("_"):
                continue
            try:
                check()
                error = None
            except Exception:
                error = traceback.format_exc()[-3000:]
            print(json.dumps({"what": name.replace("_", " "), "error": error}), file=results, flush=True)


if __name__ == "__main__":
    main()
