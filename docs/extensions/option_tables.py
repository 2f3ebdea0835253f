"""Tables of all options for the reference."""

from dataclasses import fields
from typing import Any

from maxsimd.api.config import ServerConfig
from maxsimd.api.options import SERVED, flag_with_collection
from maxsimd.engine import EngineConfig
from maxsimd.engine.config import COLLECTIONS, GROUPS


def markdown_tables() -> str:
    """A table of options for each group."""
    lines = []
    all_fields = [field for config in (EngineConfig, ServerConfig) for field in fields(config)]
    for group, title in GROUPS.items():
        lines += [f"## {title}", "", "| option | default | meaning |", "| --- | --- | --- |"]
        within = [name for name, of in COLLECTIONS.items() if of == group]
        for field in sorted(
            (each for each in all_fields if each.metadata["group"] == group and each.name != "model"),
            key=lambda each: each.metadata["within"] in within,
        ):
            value = SERVED.get(field.name, field.default)
            computed = field.metadata["by_default"] or ""
            default = computed if value in (None, ()) else _shown(value)
            lines.append(f"| `{flag_with_collection(field.name)}` | {default} | {field.metadata['help']} |")
        lines.append("")
    return "\n".join(lines)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:,}" if isinstance(default, int) and default >= 10_000 else str(default)
