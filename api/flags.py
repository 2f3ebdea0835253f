"""Options of the engine as the command line spells them, in messages that name them as Python does."""

import re
from dataclasses import fields

from maxsimd.engine.config import EngineConfig

# A field of requests too.
_AMBIGUOUS = {"window_overlap"}
_NAMES = [field.name for field in fields(EngineConfig)]
_UNMISTAKABLE = [name for name in _NAMES if "_" in name and name not in _AMBIGUOUS]
# A name with a value, or one that is no word of English; not as a part of a path or of another name,
# and not where the file of keys gives it to a tenant.
_NAMED = re.compile(
    rf'(?<![\w./-])(?:(?P<given>{"|".join(_NAMES)})=(?:True\b|"(?P<text>[^"]*)"|(?P<value>[\w.-]*\w))'
    rf"|(?P<name>{'|'.join(_UNMISTAKABLE)}))(?![\w/=]| of the tenant)"
)


def in_flags(message: str) -> str:
    """`allow_pickle=True` becomes --allow-pickle, `kernels="torch"` --kernels torch and `cache_mb`
    --cache-mb."""
    return _NAMED.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name = found["given"] or found["name"]
    value = found["text"] or found["value"]
    return f"--{name.replace('_', '-')}" + (f" {value}" if value else "")
