"""What browsers are told: which pages may use the server."""

from maxsimd.api.cors import CrossOrigin
from tests.unit.calling_handlers import RERANK, Caller, RecordingEngine

HERE = "https://here.example"
PREFLIGHT = {"origin": HERE, "access-control-request-method": "POST"}


async def test_no_page_may_use_a_server_that_names_none(engine: RecordingEngine) -> None:
    caller = Caller(engine)
    for answer in (
        await caller.ask("POST", "/rerank", RERANK, {"origin": HERE}),
        await caller.ask("OPTIONS", "/rerank", headers=PREFLIGHT),
    ):
        assert not [name for name in answer.headers if name.startswith("Access-Control") or name == "Vary"]
    assert answer.status == 405


async def test_pages_of_named_origins_may_read_all_answers(engine: RecordingEngine) -> None:
    caller = Caller(engine, cors_origin=(HERE, "https://there.example"))
    for path, body, status in (("/rerank", RERANK, 200), ("/rerank", b"{", 400), ("/nope", b"", 404)):
        answer = await caller.ask("POST", path, body, {"origin": HERE})
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == HERE
        assert "X-Request-ID" in answer.headers["Access-Control-Expose-Headers"]
        assert answer.headers["Vary"] == "Origin"
    for origin in ("https://else.example", "http://here.example", "null", ""):
        other = await caller.ask("POST", "/nope", b"", {"origin": origin})
        assert "Access-Control-Allow-Origin" not in other.headers, origin
        assert other.headers["Vary"] == "Origin"


async def test_a_browser_may_ask_without_a_key_whether_it_may_ask(engine: RecordingEngine) -> None:
    caller = Caller(engine, cors_origin=(HERE,), api_key=("one",))
    headers = PREFLIGHT | {"access-control-request-headers": "authorization, content-type, x-stainless-os"}
    answer = await caller.ask("OPTIONS", "/rerank", headers=headers)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == HERE
    assert answer.headers["Access-Control-Allow-Methods"] == "DELETE, GET, HEAD, POST"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
    assert answer.headers["Access-Control-Max-Age"] == "600"
    for refused in (
        PREFLIGHT | {"origin": "https://else.example"},
        {"access-control-request-method": "POST"},
        {"origin": HERE},
    ):
        assert (await caller.ask("OPTIONS", "/rerank", headers=refused)).status == 401
    assert (await caller.ask("POST", "/rerank", RERANK, PREFLIGHT)).status == 401


async def test_a_star_stands_for_all_origins() -> None:
    everyone = CrossOrigin(("*",))
    headers = everyone.headers("https://any.example")
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert "Vary" not in headers
    assert everyone.preflight("OPTIONS", PREFLIGHT, ("GET",)) is not None


async def test_only_names_of_headers_are_repeated() -> None:
    for names in ("x\r\nSet-Cookie: a=b", "x;y", "", "x" * 1001):
        answer = CrossOrigin((HERE,)).preflight(
            "OPTIONS", PREFLIGHT | {"access-control-request-headers": names}, ("GET",)
        )
        assert answer is not None
        assert "Access-Control-Allow-Headers" not in answer.headers
