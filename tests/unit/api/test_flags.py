"""Messages of the engine name options as Python does, and those of the server as the command line does."""

import re
from pathlib import Path

from maxsimd.api.flags import in_flags

ENGINE = Path(__file__).parents[3] / "engine"


def test_options_become_flags() -> None:
    for message, expected in (
        ("trust them with allow_pickle=True", "trust them with --allow-pickle"),
        ('try kernels="torch" or another dtype: 1e-3', "try --kernels torch or another dtype: 1e-3"),
        ("raise cache_mb, name a folder (cache_dir)", "raise --cache-mb, name a folder (--cache-dir)"),
        ("with max_model_len=512 there is none", "with --max-model-len 512 there is none"),
        ("dimensions=99 is more than 8", "--dimensions 99 is more than 8"),
        ("raise max_request_tokens", "raise --max-request-tokens"),
        # Not what only looks like one.
        ("max_request_tokens of the tenant 'a'", "max_request_tokens of the tenant 'a'"),
        ("no model of this device, in dtype float32", "no model of this device, in dtype float32"),
        ("/tmp/cache_dir/x is full", "/tmp/cache_dir/x is full"),
        ("my_cache_dir and cache_dirs", "my_cache_dir and cache_dirs"),
        ("window_overlap must be less", "window_overlap must be less"),
        ("models-device=1", "models-device=1"),
    ):
        assert in_flags(message) == expected


def test_the_engine_names_no_flags() -> None:
    """But those of other programs."""
    for path in sorted(ENGINE.rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            code = line.partition("#")[0]
            for flag in re.findall(r"(?<!-)--[a-z][a-z-]+", code):
                assert flag in ("--no-deps", "--check", "--merge"), (
                    f"{path.relative_to(ENGINE)}: {line.strip()}"
                )
