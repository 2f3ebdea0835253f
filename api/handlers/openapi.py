"""The page /openapi.json (OpenAPI 3.1.0): routes with their bodies and answers, made of the wire types."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from maxsimd import __version__
from maxsimd.api.handlers.rerank import ENGINE_FIELDS, TeiRanked
from maxsimd.api.handlers.route import Group, Route
from maxsimd.api.wire import ErrorResponse, Scoring

_JSON = "application/json"
_REFERENCES = "#/components/schemas/{name}"
_ABOUT = (
    "Scores documents for queries: late interaction, cross-encoders, bi-encoders, sparse and listwise "
    "models. The answer's `warnings` name fields that were not read. A field that is null counts as left out."
)
_GROUPS = {
    Group.RANK: "In the shapes of Jina, Cohere, Voyage and vLLM; the request's fields decide.",
    Group.EMBED: "In the shapes of OpenAI, Jina, Voyage and vLLM.",
    Group.CLASSIFY: "In the shapes of vLLM and Infinity.",
    Group.TOKENS: "How the model reads a text.",
    Group.BATCHES: "OpenAI's files and batch jobs, on a server with `--batch-dir`.",
    Group.TEI: "Routes for clients of text-embeddings-inference and Hugging Face.",
    Group.COHERE: "Routes for Cohere's clients, beside /v2/rerank.",
    Group.OTHERS: "Routes for clients of other services.",
    Group.OPERATE: "Health, models, metrics and the cache.",
}
# Headers of answers: a description and an example.
_HEADERS = {
    "x-request-id": ("Id of the request in the log: the client's own `x-request-id`, or a new one.", "r-1"),
    "server-timing": ("Milliseconds that the parts of the request took.", "model;dur=9.1, total;dur=12.5"),
    "x-maxsimd-warnings": ("The answer's warnings.", "the field `topn` is not read here"),
    "x-maxsimd-score-scale": ("What the scores mean, with their bounds.", "sigmoid; bounds=0, 1"),
    "retry-after": ("Seconds to wait before another try, with status 429 or 503.", "5"),
    "x-compute-type": ("Kind of device: cpu or gpu.", "cpu"),
    "x-compute-time": ("Milliseconds in the engine.", "12"),
    "x-compute-characters": ("Characters of all texts.", "81"),
    "x-compute-tokens": ("Tokens of all texts.", "27"),
    "x-total-time": ("Milliseconds in the engine.", "12"),
    "x-tokenization-time": ("Milliseconds of tokenization.", "1"),
    "x-queue-time": ("Milliseconds in the queue.", "2"),
    "x-inference-time": ("Milliseconds of the model.", "9"),
}
_ALWAYS = ("x-request-id", "server-timing")
_OF_TEI = tuple(name for name in _HEADERS if name.startswith("x-compute") or name.endswith("-time"))

Page = dict[str, Any]


def openapi_page(routes: Iterable[Route], open_routes: Collection[str]) -> bytes:
    """The page as JSON. `open_routes` need no key, and have the same fields when they answer 503."""
    routes = list(routes)
    shown = [each for route in routes for each in (*route.kinds, *route.answers) if not isinstance(each, str)]
    types: list[Any] = [*dict.fromkeys((ErrorResponse, *shown))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)
    for kind in types:
        if kind.__class__ is msgspec.StructMeta:
            fields = components[kind.__name__]["properties"]
            # Its own fields first, those of its bases last.
            names = dict.fromkeys(name for each in kind.__mro__ for name in inspect.get_annotations(each))
            components[kind.__name__]["properties"] = {name: fields[name] for name in names if name in fields}
    for kind, metas in ENGINE_FIELDS.items():
        for name, meta in metas.items():
            field = components[kind.__name__]["properties"][name]
            field["description"] = meta.description
            if meta.examples:
                field["examples"] = meta.examples
    for component in components.values():
        for field in component.get("properties", {}).values():
            _complete(field, components)

    def schema_of(*kinds: Any) -> Page:
        """One schema that any of these fits."""
        fitting = [schemas[types.index(kind)] for kind in kinds]
        return fitting[0] if len(fitting) == 1 else {"anyOf": fitting}

    paths: dict[str, Page] = {}
    for route in routes:
        operation = _operation(route, schema_of, is_open=route.path in open_routes)
        for method in route.methods:
            if method != "HEAD":
                name = re.sub(r"[\W_]+", "-", f"{method.lower()}{route.path}").strip("-")
                paths.setdefault(route.path, {})[method.lower()] = {"operationId": name, **operation}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "maxsimd", "version": __version__, "description": _ABOUT},
            "tags": [{"name": group, "description": _GROUPS[group]} for group in Group],
            "paths": paths,
            "components": {
                "schemas": components,
                "headers": {
                    name: {"description": description, "schema": {"type": "string"}, "example": example}
                    for name, (description, example) in _HEADERS.items()
                },
                "securitySchemes": {
                    "key": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "An API key of the server, if it has some (`--api-key`).",
                    }
                },
            },
            # A key is needed only if the server has some.
            "security": [{"key": []}, {}],
        }
    )


def _complete(field: Page, components: Page) -> None:
    """Puts a field that may be null in fewer words, and gives a field of objects an example."""
    for each in (field, *field.get("anyOf", ())):
        if "enum" in each:
            each["type"] = "string"
    if field.get("default", ...) is None:
        del field["default"]
    choices = field.get("anyOf", ())
    if "description" not in field and choices:
        field |= {name: choices[0].pop(name) for name in ("description", "examples")}
    if len(choices) == 2 and "type" in choices[0] and choices[1] == {"type": "null"}:
        del field["anyOf"]
        field |= choices[0] | {"type": [choices[0]["type"], "null"]}
        if "enum" in field:
            field["enum"].append(None)
    if "examples" not in field:
        field["examples"] = [_example_of(field, components)]


def _example_of(schema: Page, components: Page) -> Any:
    if "examples" in schema:
        return schema["examples"][0]
    if "$ref" in schema:
        fields = components[schema["$ref"].rpartition("/")[2]]["properties"]
        return {name: _example_of(field, components) for name, field in fields.items()}
    if "anyOf" in schema:
        return _example_of(schema["anyOf"][0], components)
    return [_example_of(schema["items"], components)] if schema.get("items") else None


def _operation(route: Route, schema_of: Callable[..., Page], is_open: bool) -> Page:
    content: Page = {each: {} for each in route.answers if isinstance(each, str)}
    in_json = [each for each in route.answers if not isinstance(each, str)]
    if in_json:
        content[_JSON] = {"schema": schema_of(*in_json)}
    answer: Page = {
        "description": "Done.",
        "headers": _headers(*_ALWAYS, *_headers_of(route)),
        **({"content": content} if content else {}),
    }
    error = {
        "description": "An error. Its message says what to change.",
        "headers": _headers(*_ALWAYS, "retry-after"),
        "content": {_JSON: {"schema": schema_of(ErrorResponse)}},
    }
    operation: Page = {
        "tags": [route.shown.group],
        "summary": route.shown.summary,
        "responses": {str(route.status): answer, "default": error},
    }
    if is_open:
        operation["responses"]["503"] = {**answer, "description": "The server cannot take requests now."}
        operation["security"] = [{}]
    if route.kinds:
        body = {"schema": schema_of(*route.kinds), "example": route.shown.example}
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    is_of_batches = route.shown.group is Group.BATCHES
    if "{name}" in route.path:
        operation["parameters"] = [
            {
                "name": "name",
                "in": "path",
                "required": True,
                "description": "Id." if is_of_batches else "Name of a served model.",
                "example": "file-6b1c0e" if is_of_batches else "all-MiniLM-L6-v2",
                "schema": {"type": "string"},
            }
        ]
    return operation


def _headers(*names: str) -> Page:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _headers_of(route: Route) -> tuple[str, ...]:
    """The headers of the route's answers that not all answers have."""
    if not route.kinds:
        return ()
    scored = any(isinstance(kind, type) and issubclass(kind, Scoring) for kind in route.kinds)
    scale = ("x-maxsimd-score-scale",) if scored else ()
    is_teis = route.shown.group is Group.TEI and route.path != "/decode"
    tei = _OF_TEI if is_teis or list[TeiRanked] in route.answers else ()
    return ("x-maxsimd-warnings", *scale, *tei)
