"""The documentation as Sphinx draws it: links, what it loads, and whether all people can read it."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers.handle import description
from maxsimd.api.options import flag_with_collection
from maxsimd.engine import Engine, EngineConfig, SyncEngine
from tests.documentation.test_code_blocks import BESIDE_DOCS, ROOT
from tests.forked import Program
from tests.server.browser import VIEWS, opened
from tests.server.conftest import web_server

DOCS = ROOT / "docs"
PAGES = [*DOCS.glob("**/*.md"), *DOCS.glob("**/*.ipynb")]
NAMES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES)
# A page of text, code and tables, and one of pictures. The others are checked before a release.
TYPICAL = [("index", "dark"), ("tenants", "phone")]
OTHERS = [(name, "light") for name in NAMES]
OTHERS += [("tenants", "dark"), ("clients", "phone"), ("reference/http", "phone")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built so that a page or heading that a link leads to and that is not there is an error."""
    built = tmp_path_factory.mktemp("site")
    Program(["-q", "-W", "--keep-going", str(DOCS), str(built)], module="sphinx").run()
    return built


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    with web_server(partial(SimpleHTTPRequestHandler, directory=str(folder))) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "view"), [*TYPICAL, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHERS)]
)
def test_a_page_can_be_read_by_all(browser: Browser, site: str, name: str, view: str) -> None:
    with opened(browser, f"{site}/{name}.html", **VIEWS[view]) as watched:
        expect(watched.page.locator("h1")).to_have_count(1)
        assert not watched.serious_findings()
        watched.check(site)


def test_every_page_has_a_heading_and_the_reference_has_all(folder: Path) -> None:
    for name in NAMES:
        html = (folder / f"{name}.html").read_text(encoding="utf-8")
        assert html.count("<h1") == 1, name
        foreign = r"""<(?:script|img|iframe)[^>]+src=["'](?:https?:)?//|<link[^>]+sheet[^>]+href=["']http"""
        assert not re.findall(foreign, html), name
    http = (folder / "reference" / "http.html").read_text(encoding="utf-8")
    for path, methods in json.loads(description())["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}<" in http
    options = (folder / "reference" / "options.html").read_text(encoding="utf-8")
    for field in (*fields(EngineConfig), *fields(ServerConfig)):
        if field.name not in ("model", "max_output_mb"):
            words = [f">{word}<" for word in flag_with_collection(field.name).split()]
            assert re.search(r"/span>\s*<span[^>]*".join(map(re.escape, words)), options)
    python = (folder / "reference" / "python.html").read_text(encoding="utf-8")
    for of in (Engine, SyncEngine):
        for name in dir(of):
            if not name.startswith("_"):
                assert re.search(rf'id="maxsimd\.engine\.[\w.]*{name}"', python), f"{of.__name__}.{name}"


def test_what_is_looked_for_is_found(browser: Browser, site: str) -> None:
    with opened(browser, f"{site}/search.html?q=calibration") as watched:
        expect(watched.page.locator("ul.search li").first).to_be_visible()
        watched.page.goto(f"{site}/models.html")
        watched.page.get_by_label("Filter this table").first.fill("late jina")
        expect(watched.page.locator("table").first.locator("tbody tr:visible")).to_have_count(2)
        watched.check(site)


def test_the_reference_has_every_field(browser: Browser, site: str) -> None:
    with opened(browser, f"{site}/reference/http.html") as watched:
        watched.page.get_by_role("link", name="POST /v2/rerank").click()
        route = watched.page.locator(".opblock.is-open")
        expect(route.locator(".opblock-summary-path")).to_have_text("/v2/rerank")
        route.get_by_role("tab", name="Schema").first.click()
        expect(route.get_by_text("return_documents", exact=True).first).to_be_visible()
        watched.check(site)


@pytest.mark.parametrize("page", BESIDE_DOCS, ids=lambda path: path.name)
def test_links_of_pages_beside_docs_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    assert links
    for path, heading in links:
        target = page.parent / path
        assert target.exists(), path
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, (
                heading
            )
