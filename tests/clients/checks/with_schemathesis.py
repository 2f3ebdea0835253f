"""schemathesis: requests made of what /openapi.json says, and answers held against it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from plain import ALL, for_each

_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
)  # fmt: skip
# At least so many cases a server, and so many of them drawn at random for each route.
_CASES, _DRAWN = 2_000, 40
_SECONDS = 180


def _check(url: str) -> None:
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"),
        *("--checks", ",".join(_CHECKS), "--phases", "coverage,fuzzing", "--continue-on-failure"),
        *("--max-examples", str(_DRAWN), "--generation-deterministic", "--suppress-health-check", "all"),
        *("--request-timeout", "60", "--no-color"),
    ]
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(
        command, env=os.environ | hooks, capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    said = ran.stdout.partition("= FAILURES =")[2].partition("= WARNINGS =")[0] or ran.stdout
    assert ran.returncode == 0, said[:2500] + ran.stderr[-400:]
    generated = re.search(r"([\d,]+) generated", ran.stdout)
    assert generated is not None, ran.stdout[-2500:]
    cases = int(generated[1].replace(",", ""))
    assert cases >= _CASES, f"only {cases} cases"


def finds_no_fault() -> None:
    for_each({url: url for url in ALL}, _check)
