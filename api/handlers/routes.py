"""All routes: for each path, what does the work of each method; and what /openapi.json says of them."""

import functools

from maxsimd.api.answer import Answer
from maxsimd.api.handlers import (
    classification,
    cohere,
    embedding,
    infinity,
    invocations,
    models,
    ollama,
    operating,
    pages,
    scoring,
    tei,
    tokens,
    voyage,
)
from maxsimd.api.handlers.openapi import described
from maxsimd.api.handlers.route import Route, Work, get
from maxsimd.api.state import ServerState


async def openapi(state: ServerState) -> Answer:
    are_changed = state.models is not None and state.keys.has_admins
    return Answer(200, {"Content-Type": "application/json"}, description(are_changed))


@functools.cache
def description(models_are_changed: bool = False) -> bytes:
    """What /openapi.json answers, and where models may be loaded and dropped."""
    more = models.ROUTES if models_are_changed else ()
    return described((*_ALL, *more, *pages.ROUTES), OPEN_ROUTES)


def table(*groups: tuple[Route, ...]) -> dict[str, dict[str, Work]]:
    """For each path, what does the work of each method."""
    works: dict[str, dict[str, Work]] = {}
    for route in (route for group in groups for route in group):
        for method in route.methods:
            works.setdefault(route.path, {})[method] = route.work
    return works


# What load balancers ask must be answered without a key. Nothing else is.
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})
# Pages hold nothing of the model's, and ask for the key themselves. What is posted to their paths is not
# open.
PAGES = frozenset(route.path for route in pages.ROUTES)
_ALL = (
    *scoring.ROUTES,
    *embedding.ROUTES,
    *classification.ROUTES,
    *tokens.ROUTES,
    *tei.ROUTES,
    *cohere.ROUTES,
    *voyage.ROUTES,
    *infinity.ROUTES,
    *ollama.ROUTES,
    *invocations.ROUTES,
    *operating.ROUTES,
    get("/openapi.json", openapi),
)

ROUTES = table(_ALL, pages.ROUTES)
METHODS = frozenset(method for methods in ROUTES.values() for method in methods)
