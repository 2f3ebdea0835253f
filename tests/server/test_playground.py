"""The page at /, in a real browser before a real server."""

import base64
import csv
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.exhaustive import exhaustive
from tests.server.browser import VIEWS, opened
from tests.server.conftest import Server, StartServer

QUERY = "Wo gibt es Käse 🎉 in 東京?"
DOCUMENTS = [
    "Der gute Käse ist da 🎉🎉.", "In 東京 fährt ein Zug.", "e\u0301te\u0301 naïve 👨\u200d👩 party",
    "Nothing of this.",
]  # fmt: skip

ONE_OF_THE_VIEWS = pytest.mark.parametrize("view", ["light", *exhaustive(*list(VIEWS)[1:])])


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with opened(browser, server.url + "/") as watched:
        yield watched.page
        watched.check(server.url)


def _fill(page: Page, query: str, documents: list[str]) -> None:
    page.fill("#query", query)
    with page.expect_response(
        lambda answer: (
            answer.url.endswith("/rerank")
            and (asked := answer.request.post_data_json)["query"] == query
            and asked["documents"] == documents
        )
    ):
        page.fill("#documents", "\n".join(documents))
    expect(page.locator(".results > li")).to_have_count(len(documents))


def _explained(server: Server, query: str, documents: list[Any]) -> list[Any]:
    asked = {"query": query, "documents": documents, "explain": True}
    return list(httpx.post(server.url + "/rerank", json=asked).raise_for_status().json()["results"])


def _shown(page: Page) -> list[Any]:
    """What stands under each result: its pieces of text with their heat."""
    return page.eval_on_selector_all(
        ".results .text",
        "texts => texts.map(t => [...t.children].map(p => [p.textContent, Number(p.dataset.heat ?? 0)]))",
    )


def _word_around(text: str, start: int, end: int) -> range:
    """The characters of the words that a token is a part of, in scripts that write spaces."""
    inside = [(c.isascii() and c.isalnum()) or unicodedata.category(c) in ("Mn", "Ll") for c in text]
    while start > 0 and inside[start - 1] and inside[start]:
        start -= 1
    while end < len(text) and inside[end - 1] and inside[end]:
        end += 1
    return range(start, end)


def _expected(result: Any, text: str, query: str, word: str) -> list[tuple[str, float]]:
    """How much each character answers a word of the query, by what `explain` says."""
    start = query.index(word)
    heat = [0.0] * len(text)
    for match in result["explanation"]["matches"]:
        asked, found = match["query_span"], match["document_span"]
        if asked and found and start <= asked[0] and asked[1] <= start + len(word):
            for i in _word_around(text, *found):
                heat[i] = max(heat[i], match["similarity"])
    return [*zip(text, heat, strict=True)]


def test_pointing_or_the_keyboard_shows_what_explain_says(page: Page, server: Server) -> None:
    _fill(page, QUERY, DOCUMENTS)
    results = _explained(server, QUERY, DOCUMENTS)
    for pieces in _shown(page):
        assert any(heat > 0 for _, heat in pieces), "without pointing all matches are coloured"
    for word in ("Käse", "🎉", "東"):
        button = page.get_by_role("button", name=word, exact=True)
        button.hover()
        for pieces, result in zip(_shown(page), results, strict=True):
            text = DOCUMENTS[result["index"]]
            found = [(character, heat) for part, heat in pieces for character in part]
            assert [character for character, _ in found] == [*text]
            expected = _expected(result, text, QUERY, word)
            assert [heat for _, heat in found] == pytest.approx([heat for _, heat in expected], abs=1e-3)
        start = QUERY.index(word)
        share = sum(
            match["share"]
            for match in results[0]["explanation"]["matches"]
            if match["query_span"] and start <= match["query_span"][0] < start + len(word)
        )
        title = button.get_attribute("title") or ""
        assert float(title.split("%")[0]) == pytest.approx(share * 100, abs=0.06)
    scores = [float(score) for score in page.locator(".results strong").all_text_contents()]
    assert scores == pytest.approx([result["relevance_score"] for result in results], abs=1e-3)
    page.get_by_text("Why this score").first.click()
    shares = page.locator(".results > li:first-child td.number:nth-of-type(2)").all_text_contents()
    assert sum(float(share.removesuffix("%")) for share in shares) == pytest.approx(100, abs=1)
    _fill(page, QUERY, DOCUMENTS[::-1])
    plain = _shown(page)
    page.get_by_role("button", name="Käse", exact=True).focus()
    focused = _shown(page)
    assert focused != plain
    page.keyboard.press("Enter")
    assert page.get_by_role("button", name="Käse", exact=True).get_attribute("aria-pressed") == "true"
    page.locator("#query").focus()
    assert _shown(page) == focused, "a word that was chosen stays so"
    page.get_by_role("tab", name="Rank").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tabpanel", name="Live figures").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("tabpanel", name="Rank").is_visible()


@ONE_OF_THE_VIEWS
def test_people_who_cannot_see_or_point_can_use_it(browser: Browser, server: Server, view: str) -> None:
    with opened(browser, server.url + "/", **VIEWS[view]) as watched:
        page = watched.page
        page.wait_for_selector(".results > li")
        page.locator(".words button").nth(5).focus()
        page.get_by_text("Why this score").first.click()
        assert not watched.serious_findings()
        if folder := os.environ.get("MAXSIMD_SCREENSHOTS"):
            page.get_by_text("Why this score").first.click()
            page.locator(".words button").nth(5).focus()
            page.wait_for_timeout(300)
            page.screenshot(path=Path(folder) / f"playground-{view}.png")
        page.fill("#query", "w" * 150)
        expect(page.locator(".words button")).to_have_count(1)
        page.evaluate("hold({ name: 'b'.repeat(120), documents: [] })")
        assert page.evaluate(BEYOND_THE_WINDOW) <= 0
        page.get_by_role("tab", name="Live figures").click()
        page.wait_for_selector(".figure")
        assert not watched.serious_findings()
        watched.check(server.url)


def test_live_figures_are_those_of_the_metrics(page: Page, server: Server) -> None:
    page.get_by_role("tab", name="Live figures").click()
    page.wait_for_selector(".figure")
    memory = page.locator(".figure", has_text="Memory").locator("b").text_content() or ""
    there = server.metric("process_resident_memory_bytes") / 2**20
    assert float(memory.replace(",", "")) == pytest.approx(there, rel=0.2)
    for _ in range(3):
        httpx.post(server.url + "/score", json={"queries": "q", "documents": ["a new document"]})
    figure = page.locator(".figure", has_text="answered, on all routes").locator("b")
    expect(figure).to_have_text(re.compile(r"^[1-9]"), timeout=300_000)
    page.evaluate("lastReading.at -= 60_000")
    expect(page.locator("#live-status")).to_have_text("Measuring for two seconds")
    page.get_by_role("tab", name="Rank").click()
    page.evaluate("window.asked = 0; window.fetch = () => Promise.reject(++window.asked); 0")
    page.evaluate("Promise.all([1, 2, 3].map(() => findModels()))")
    page.wait_for_timeout(2500)
    assert page.evaluate("window.asked") == 4, "one question is repeated, however often it was asked"


FILES = {
    "a.txt": ("one\n\n two \n", ["one", "two"]),
    "a.jsonl": (
        '"a\\rb"\n{"id": 7, "text": "two"}\n{"a": 1}\n{"text": ""}\n',
        ["a\rb", "two", '{"a":1}', ""],
    ),
    "b.jsonl": ('"one\\rline"\n" two"\n', ["one\rline", " two"]),
    "a.json": ('[{"content": "one"}, "two"]', ["one", "two"]),
    "a.csv": ('id,text\r\n1,"one, ""two"""\r\n2,"two\nlines"\r\n', ['one, "two"', "two\nlines"]),
    "a.tsv": ("title\tx\none\t1\n", ["one"]),
    "b.tsv": ('id\ttext\n1\t"open\n2\t"too\n', ['"open', '"too']),
}


def test_files_and_what_is_dropped_are_read(page: Page, server: Server, tmp_path: Path) -> None:
    def asked_for(texts: list[str]) -> Any:
        return page.expect_request(
            lambda asked: asked.url.endswith("/rerank") and asked.post_data_json["documents"] == texts
        )

    for name, (content, texts) in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        with asked_for(texts):
            page.set_input_files("#file", tmp_path / name)
        expect(page.locator(".results > li")).to_have_count(len(texts))
    for brought, texts in (
        ('items.add(new File([\'{"text": "one"}\\n{"text": "two"}\\n\'], \'a.jsonl\'))', ["one", "two"]),
        ("setData('text/plain', 'three\\n four \\n five\\n')", ["three", "four", "five"]),
    ):
        make = f"() => {{ const made = new DataTransfer(); made.{brought}; return made; }}"
        carried = page.evaluate_handle(make)
        page.dispatch_event("#documents", "dragover", {"dataTransfer": carried})
        expect(page.locator("#documents")).to_have_class(re.compile("over"))
        with asked_for(texts):
            page.dispatch_event("#documents", "drop", {"dataTransfer": carried})
        expect(page.locator(".results > li")).to_have_count(len(texts))


def test_what_is_wrong_is_said(browser: Browser, server: Server, tmp_path: Path) -> None:
    bad = [tmp_path / name for name in ("a.json", "b.csv")]
    for file in bad:
        file.write_text('{ text,"', encoding="utf-8")
    with opened(browser, server.url + "/") as watched:
        page = watched.page
        page.set_input_files("#file", bad)
        page.get_by_text(re.compile("a.json cannot be read.*b.csv .*: a quote is never")).wait_for()
        page.fill("#documents", "")
        page.get_by_text("Type a query and some documents").wait_for()
        page.fill("#documents", "\n".join(["d"] * 501))
        page.click("#go")
        page.get_by_text(re.compile("at most 500")).wait_for()
        page.evaluate("const file = new File([], 'a', { type: 'image/png' }); take([file]), take([file])")
        expect(page.locator("#pictures img")).to_have_count(2)


def test_it_can_be_taken_to_a_shell_and_to_python(page: Page, server: Server, tmp_path: Path) -> None:
    documents = ['it\'s a "test" of quotes', "Käse 🎉", "nothing $HOME `date` \\n"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    _fill(page, "it's", documents)
    expected = [result["index"] for result in _explained(server, "it's", documents)]
    page.click("#curl")
    page.get_by_text("Copied as curl").wait_for()
    shell = page.evaluate("navigator.clipboard.readText()")
    ran = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, timeout=600)
    assert [result["index"] for result in json.loads(ran.stdout)["results"]] == expected
    page.click("#python")
    page.get_by_text("Copied as Python").wait_for()
    code = page.evaluate("navigator.clipboard.readText()")
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert [line.split(" ", 1)[1] for line in ran.stdout.splitlines()] == [documents[i] for i in expected]


def test_it_tells_of_waiting_and_failing(page: Page, server: Server) -> None:
    _fill(page, QUERY, DOCUMENTS)
    expect(page.locator(".status")).to_have_text(
        re.compile(r"4 documents ranked: [\d,]+ ms on the server, [\d,]+ ms in all")
    )
    page.route("**/rerank", lambda route: None)
    page.fill("#query", "cheese")
    column = page.locator(".column.stale")
    expect(column).to_have_attribute("aria-busy", "true")
    page.click("#stop")
    expect(column).to_have_attribute("aria-busy", "false")
    page.get_by_text("Stopped.").wait_for()
    page.unroute("**/rerank")
    # A refusal without the browser's own complaint of it.
    page.evaluate(
        """() => {
            const [send, body] = [window.fetch, JSON.stringify({ error: { message: "too many wait" } })];
            const [answers, headers] = [[[body, 429], ["<p>a proxy's page", 503]], { "retry-after": "50" }];
            const refusal = ([text, status] = answers.pop()) => new Response(text, { status, headers });
            window.fetch = async (url, ...rest) =>
                window.mends || !String(url).endsWith("rerank") ? send(url, ...rest) : refusal();
        }"""
    )
    page.click("#go")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text(re.compile(r"The server is not ready.*Next try in \d+ s"))
    problem.get_by_role("button", name="Try now").click()
    expect(problem).to_contain_text(re.compile(r"The server is busy.*too many wait.*Next try in \d+ s"))
    page.evaluate("window.mends = true")
    problem.get_by_role("button", name="Try now").click()
    expect(problem).to_be_hidden()
    page.check("#normalize")
    page.get_by_text("Mean MaxSim").wait_for()
    assert all(0 <= float(score) <= 1 for score in page.locator(".results strong").all_text_contents())


BEYOND_THE_WINDOW = "document.documentElement.scrollWidth - window.innerWidth"
TABLE = 'id,title,text\na1,"<img src=x onerror=alert(1)>",Open a file\na2,,"=1+1, a sum"\n'


def test_a_ranking_can_be_shared_and_downloaded(page: Page, server: Server, tmp_path: Path) -> None:
    page.fill("#key", "secret")
    for pasted, told in (
        ('{"_id": 7, "text": "Open a file"}\n"b"', "2 documents from JSON lines"),
        ('{"a": 1}\n\n\nb', "2 documents. Line 4 is not JSON, so each line is read as text."),
        (TABLE, "2 documents from CSV"),
    ):
        page.fill("#documents", pasted)
        expect(page.locator("#count")).to_have_text(told)
    expect(page.locator(".results > li")).to_have_count(2)
    expect(page.locator(".column.stale, .column.busy")).to_have_count(0)
    assert "".join(page.locator(".results .title").all_text_contents()) == "<img src=x onerror=alert(1)>"
    with page.expect_download() as download:
        page.click("#csv")
    rows = [*csv.DictReader(download.value.path().open(encoding="utf-8"))]
    ranked = [("1", "a1", "Open a file"), ("2", "a2", "'=1+1, a sum")]
    assert [(row["rank"], row["id"], row["text"]) for row in rows] == ranked
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page.click("#link")
    page.get_by_text("Copied the link").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    assert "secret" not in link
    page.fill("#documents", "x" * 9000)
    page.click("#link")
    page.get_by_text("too long for a link").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(link)
    page.reload()
    page.get_by_text("Nothing has been sent yet").wait_for()
    page.get_by_text("reads 256 tokens").wait_for()
    assert page.input_value("#documents") == TABLE
    assert (page.input_value("#key"), page.evaluate("sessionStorage.length")) == ("", 1)
    assert not [url for url in asked if url.endswith("/rerank")]
    page.click("#go")
    expect(page.locator(".results > li")).to_have_count(2)
    page.reload()
    expect(page.locator(".results > li")).to_have_count(2)


def test_the_heat_map_has_the_matches_of_explain(page: Page, server: Server) -> None:
    _fill(page, QUERY, DOCUMENTS)
    (best, *_) = _explained(server, QUERY, DOCUMENTS)
    page.select_option("#long", "truncate")
    expect(page.locator(".column.stale, .column.busy")).to_have_count(0)
    with page.expect_request(lambda sent: (sent.post_data_json or {}).get("long_documents") == "truncate"):
        page.get_by_role("button", name="Heat map").first.click()
    page.locator("#map-canvas").wait_for()
    page.check("#markers")
    page.uncheck("#merge")
    page.locator("#map-canvas").focus()
    said = page.locator("#map-cell")
    values = page.evaluate("map.values")
    matches = best["explanation"]["matches"]
    assert [max(row) for row in values] == pytest.approx([match["similarity"] for match in matches], abs=1e-3)
    assert page.evaluate("map.best") == [match["document_row"] for match in matches]
    page.keyboard.press("ArrowDown")
    column = matches[0]["document_row"]
    expect(said).to_have_text(
        re.compile(f"^{re.escape(matches[1]['query_token'])} × .*: {values[1][column]:.3f}")
    )
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


@pytest.mark.one_process
def test_two_models_are_compared(
    browser: Browser, module_starter: StartServer, bert_cross_encoder: str, tmp_path: Path
) -> None:
    config = tmp_path / "maxsimd.yaml"
    config.write_text(
        json.dumps({"models": {"late": {}, "pairs": {"model": bert_cross_encoder}}, "dtype": "float32"})
    )
    server = module_starter("--config", str(config))
    with opened(browser, server.url + "/") as watched:
        page = watched.page
        page.wait_for_selector(".results > li")
        page.select_option("#rival", "pairs")
        page.get_by_text("Kendall's tau:").wait_for()
        for name in ("late", "pairs"):
            column = page.get_by_role("region", name=name, exact=True)
            expect(column.locator(".results > li")).to_have_count(6)
        assert not watched.serious_findings()
        watched.check(server.url)


@pytest.fixture(scope="module")
def server_with_key(module_starter: StartServer, bert_cross_encoder: str) -> Server:
    return module_starter(bert_cross_encoder, "--api-key", "secret")


def test_a_key_is_asked_for_and_kept_in_memory(browser: Browser, server_with_key: Server) -> None:
    server = server_with_key
    assert httpx.get(server.url + "/").status_code == 200
    assert httpx.post(server.url + "/", json={"inputs": "a"}).status_code == 401
    with opened(browser, server.url.replace("//", "//user:password@") + "/") as watched:
        page = watched.page
        page.get_by_role("alert").get_by_text("This server asks for a key").wait_for()
        page.fill("#key", "secret\u200b")
        page.locator("#key").blur()
        page.get_by_role("alert").get_by_text("not ASCII").wait_for()
        page.fill("#key", "secret")
        page.locator("#key").blur()
        expect(page.locator(".results > li")).to_have_count(6)
        watched.page.get_by_role("tab", name="Live figures").click()
        page.wait_for_selector(".figure")
    with opened(browser, server.url.replace("//", "//user:password@") + "/docs#/score") as watched:
        page = watched.page
        page.get_by_text("This server asks for an API key").wait_for()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table")).to_contain_text('"score_scale"')
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_a_cross_encoder_shows_its_best_passage(browser: Browser, cross_encoder_server: Server) -> None:
    with opened(browser, cross_encoder_server.url + "/") as watched:
        watched.page.wait_for_selector(".results > li")
        assert watched.page.locator(".words button").count() == 0
        expect(watched.page.locator(".results .facts").first).to_contain_text("tokens")
        long = " ".join(["Open a file."] * 400)
        watched.page.fill("#documents", long)
        expect(watched.page.locator(".results > li")).to_have_count(1)
        expect(watched.page.locator(".results .facts")).to_contain_text("truncated")
        unread = watched.page.locator(".results .unread").text_content() or ""
        assert 0 < len(unread) < len(long)
        watched.page.select_option("#long", "window")
        expect(watched.page.locator(".results .border")).not_to_have_count(0)
        expect(watched.page.locator(".results .unread")).to_have_count(0)
        watched.check(cross_encoder_server.url)


def test_pictures_are_ranked_and_their_parts_shown(
    browser: Browser, module_starter: StartServer, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    server = module_starter(checkpoints(visual.colpali), "--dtype", "float32")
    query, files = "How do I read a file?", [tmp_path / f"page{i}.png" for i in range(2)]
    for file, picture in zip(files, (Image.linear_gradient("L"), Image.radial_gradient("L")), strict=True):
        picture.resize((80, 60)).convert("RGB").save(file)
    given = [{"image": base64.b64encode(file.read_bytes()).decode()} for file in files]
    matches = [
        match
        for result in _explained(server, query, given)
        for match in result["explanation"]["matches"]
        if match["patch"] and match["query_span"] and match["query_token"].strip()
    ]
    start = matches[0]["query_span"][0]
    word = query[query.rfind(" ", 0, start) + 1 :].split(" ")[0].rstrip("?") or "?"
    with opened(browser, server.url + "/") as watched:
        page = watched.page
        page.wait_for_selector(".results > li")
        page.fill("#query", query)
        page.set_input_files("#file", files)
        expect(page.locator("#count")).to_contain_text("2 documents")
        page.click("#go")
        expect(page.locator(".picture img")).to_have_count(2)
        page.get_by_role("button", name=word, exact=True).hover()
        expect(page.locator(".patch").first).to_be_visible()
        page.reload()
        expect(page.locator("#pictures img")).to_have_count(2)
        page.get_by_role("button", name="Remove page0.png").click()
        expect(page.locator("#count")).to_contain_text("1 document")
        assert not watched.serious_findings()
        watched.check(server.url)


def test_the_page_may_load_and_send_nothing_elsewhere(server: Server) -> None:
    answer = httpx.get(server.url + "/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
    assert httpx.head(server.url + "/").status_code == 200
    assert httpx.post(server.url + "/", json={"inputs": "a"}).status_code == 200, "still a route of TEI's"


@ONE_OF_THE_VIEWS
def test_the_reference_opens_a_route_and_tries_it(browser: Browser, server: Server, view: str) -> None:
    assert "unsafe" not in httpx.get(server.url + "/docs").headers["content-security-policy"]
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    with opened(browser, server.url + "/docs#/rerank", **VIEWS[view]) as watched:
        page = watched.page
        route = page.locator(".opblock.is-open")
        expect(route.locator(".opblock-summary-path")).to_have_text("/rerank")
        expect(page.locator(".opblock")).to_have_count(sum(map(len, paths.values())))
        route.get_by_role("tab", name="Schema").first.click()
        route.get_by_text("Number of results. Default: all.").wait_for()
        assert not watched.serious_findings()
        assert page.evaluate(BEYOND_THE_WINDOW) <= 0
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table")).to_contain_text('"relevance_score"')
        assert not watched.serious_findings()
        page.get_by_placeholder("Filter").fill("/v2/rerank")
        expect(page.locator(".opblock")).to_have_count(1)
        page.goto(server.url + "/docs#toString")
        page.reload()
        expect(page.locator(".opblock")).to_have_count(sum(map(len, paths.values())))
        watched.check(server.url)
