"""The page /openapi.json (OpenAPI 3.1.0): routes with their bodies and answers, made of the wire types."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from maxsimd import __version__
from maxsimd.api.handlers.route import Route
from maxsimd.api.wire import ErrorResponse

_JSON = "application/json"
_REFERENCES = "#/components/schemas/{name}"
_ABOUT = (
    "Relevance scores of documents for queries: late interaction, cross-encoders, bi-encoders, sparse and "
    "listwise. Fields that a route does not read are named in warnings; null means left open."
)

Page = dict[str, Any]


def openapi_page(routes: Iterable[Route], open_routes: Collection[str]) -> bytes:
    """The page as JSON. `open_routes` need no key, and have the same fields when they answer 503."""
    routes = list(routes)
    types = _types_of(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)

    def schema_of(*kinds: Any) -> Page:
        """One schema that any of these fits."""
        fitting = [schemas[types.index(kind)] for kind in kinds]
        return fitting[0] if len(fitting) == 1 else {"anyOf": fitting}

    paths: dict[str, Page] = {}
    for route in routes:
        operation = _operation(route, schema_of, is_open=route.path in open_routes)
        for method in route.methods:
            if method != "HEAD":
                name = re.sub(r"\W+", "_", f"{method.lower()}{route.path}").strip("_")
                paths.setdefault(route.path, {})[method.lower()] = {"operationId": name, **operation}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "maxsimd", "version": __version__, "description": _ABOUT},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            # A key is needed only if the server has some.
            "security": [{"key": []}, {}],
        }
    )


def _types_of(routes: Iterable[Route]) -> list[Any]:
    types: list[Any] = [ErrorResponse]
    for route in routes:
        for each in (route.kind, *route.answers):
            if each is not None and not isinstance(each, str) and each not in types:
                types.append(each)
    return types


def _operation(route: Route, schema_of: Callable[..., Page], is_open: bool) -> Page:
    content: Page = {each: {} for each in route.answers if isinstance(each, str)}
    in_json = [each for each in route.answers if not isinstance(each, str)]
    if in_json:
        content[_JSON] = {"schema": schema_of(*in_json)}
    answer: Page = {"description": "done", **({"content": content} if content else {})}
    error = {"description": "an error", "content": {_JSON: {"schema": schema_of(ErrorResponse)}}}
    operation: Page = {"responses": {str(route.status): answer, "default": error}}
    if is_open:
        operation["responses"]["503"] = {**answer, "description": "not now"}
        operation["security"] = [{}]
    if route.kind is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema_of(route.kind)}}}
    names = re.findall(r"{(\w+)}", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
