"""Writes the HTTP reference from what a server of this version answers on /openapi.json, and the tables
of options from the dataclasses that they come of."""

import html
import json
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers.handle import description
from maxsimd.api.options import markdown_tables
from maxsimd.engine import EngineConfig

Schema = dict[str, Any]

_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
# Schemas refer to each other; deeper than this their types are not written out.
_DEEPEST = 4


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx asks for what this changes."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts what is generated behind what is written."""
    if name == "reference/http":
        source[0] += "\n" + _Reference(json.loads(description())).text()
    elif name == "reference/options":
        source[0] += "\n" + markdown_tables(EngineConfig, ServerConfig)


class _Reference:
    """Draws one description in OpenAPI's terms."""

    def __init__(self, described: Schema) -> None:
        self._described = described

    def text(self) -> str:
        parts = []
        for path, methods in self._described["paths"].items():
            for method, operation in methods.items():
                parts += [f"## {method.upper()} {path}", *self._operation(operation)]
        return "\n\n".join(parts) + "\n"

    def _operation(self, operation: Schema) -> Iterator[str]:
        taken = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        if taken is not None:
            yield from self._objects("Takes", taken)
        answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        kinds: dict[str, Schema] = answers[0].get("content", {}) if answers else {}
        given = kinds.get("application/json", {}).get("schema")
        objects = [] if given is None else [*self._objects("Gives", given)]
        if objects:
            yield from objects
        elif taken is None or kinds:
            yield (
                f"Gives {', '.join(f'`{kind}`' for kind in kinds)}."
                if kinds
                else "Gives nothing but its status."
            )

    def _objects(self, title: str, schema: Schema) -> Iterator[str]:
        for each in self._objects_of(schema):
            yield f"**{title}{': ' + each['title'] if 'title' in each else ''}**"
            if "description" in each:
                yield html.escape(each["description"], quote=False)
            yield self._fields(each)

    def _objects_of(self, schema: Schema, depth: int = 0) -> list[Schema]:
        """The objects that a schema may be, through its choices and arrays."""
        meant = self._resolved(schema)
        if depth == _DEEPEST:
            return []
        if "properties" in meant:
            return [meant]
        inside = [*meant.get("anyOf", meant.get("oneOf", []))]
        if isinstance(meant.get("items"), dict):
            inside.append(meant["items"])
        return [each for one in inside for each in self._objects_of(one, depth + 1)]

    def _fields(self, schema: Schema) -> str:
        rows = ["| field | type | default |", "| --- | --- | --- |"]
        for name, field in schema["properties"].items():
            usual = f"`{json.dumps(field['default'])}`" if "default" in field else "left out"
            if name in schema.get("required", ()):
                usual = "required"
            rows.append(f"| `{name}` | {self._type(field).replace('|', '&#124;')} | {usual} |")
        return "\n".join(rows)

    def _type(self, schema: Schema, depth: int = 0) -> str:
        if not schema or depth == _DEEPEST:
            return "anything"
        if "$ref" in schema:
            meant = self._resolved(schema)
            name: str = schema["$ref"].rsplit("/", 1)[-1]
            return name if "properties" in meant else self._type(meant, depth + 1)
        if "enum" in schema:
            return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if choices := schema.get("anyOf", schema.get("oneOf")):
            return " or ".join(dict.fromkeys(self._type(each, depth + 1) for each in choices))
        if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
            return f"array of {self._type(schema['items'], depth + 1)}"
        bounds = [f"{words} {schema[bound]}" for bound, words in _BOUNDS.items() if bound in schema]
        return " ".join([schema.get("type", "anything"), *bounds])

    def _resolved(self, schema: Schema) -> Schema:
        if "$ref" not in schema:
            return schema
        found: Schema = self._described["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
        return found
