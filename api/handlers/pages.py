"""The pages that people open in a browser."""

from maxsimd.api.answer import Answer
from maxsimd.api.handlers.route import get
from maxsimd.api.pages import Page, playground, reference
from maxsimd.api.state import ServerState


async def playground_page(state: ServerState) -> Answer:
    return _answer(playground())


async def reference_page(state: ServerState) -> Answer:
    return _answer(reference())


def _answer(page: Page) -> Answer:
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": page.policy,
        # A newer server may have a newer page.
        "Cache-Control": "no-cache",
    }
    return Answer(200, headers, page.html)


ROUTES = (get("/", playground_page, "text/html"), get("/docs", reference_page, "text/html"))
