"""Routes, methods and answers, without a web server, and /openapi.json, which is true of them."""

import json
import re
from dataclasses import replace
from threading import get_ident
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from maxsimd.api.handlers.handle import ROUTES, route_of
from maxsimd.api.handlers.operating import MODEL_PATH
from tests.unit.calling_handlers import GOOD, REFUSING, RERANK, Caller, RecordingEngine, error_of, expected


async def test_openapi_has_every_route_and_valid_schemas(page: Any) -> None:
    # These need several models, or a folder for batch jobs.
    others = (MODEL_PATH, "/v1/files", "/v1/batches")
    offered = {
        (method, path) for path, works in ROUTES.items() for method in works if not path.startswith(others)
    }
    asked = {(method, route_of(path)[0]) for method, path in GOOD}
    assert offered == asked | {("HEAD", path) for method, path in asked if method == "GET"}
    described = {(path, method.upper()) for path, methods in page["paths"].items() for method in methods}
    offered = {(path, method) for path, methods in ROUTES.items() for method in methods if method != "HEAD"}
    assert described == offered
    names = [operation["operationId"] for methods in page["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    (parameter,) = page["paths"][MODEL_PATH]["get"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("name", "path", True)
    for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(page)):
        assert name in page["components"]["schemas"]
    for schema in page["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_unknown_paths_and_wrong_methods_are_told(caller: Caller) -> None:
    unknown = ("/nope", "//", "", "*", "//rerank", "/v3/score", "/v1%2Fscore", "/RERANK", "/v1/v1/v1/score")
    for path in unknown:
        answer = await caller.post(path, RERANK)
        assert (answer.status, error_of(answer)["type"]) == (404, "NotFoundError"), path
    takes = {"/rerank": "POST", "/health": "GET, HEAD", "/": "GET, HEAD, POST", "/cache": "DELETE"}
    for path, allowed in takes.items():
        for method in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"} - set(allowed.split(", ")):
            answer = await caller.ask(method, path)
            assert (answer.status, answer.headers["Allow"]) == (405, allowed), path
            assert error_of(answer)["message"] == f"this route takes {allowed}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(engine: RecordingEngine) -> Any:
    return json.loads((await Caller(engine).ask("GET", "/openapi.json")).body)


def _validator(page: Any, schema: Any) -> Any:
    return jsonschema.Draft202012Validator({**schema, "components": page["components"]})


async def test_threads_do_large_work(engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    note = lambda given: made.append(get_ident()) or given  # noqa: E731
    monkeypatch.setitem(route_of.__globals__, "description", note)
    monkeypatch.setattr("maxsimd.api.handlers.embeddings.in_unit_length", note)
    monkeypatch.setattr(RecordingEngine, "facts", replace(engine.facts, normalized=()))
    await Caller(engine).ask("GET", "/openapi.json")
    await Caller(engine).json("/v1/embeddings", {"input": ["d", "e"], "normalized": True})
    assert [each != get_ident() for each in made] == [True, True]


async def test_openapi_describes_every_field_with_a_fitting_example(page: Any) -> None:
    parts = page["components"]
    fields = [
        (f"{kind}.{name}", field)
        for kind, schema in parts["schemas"].items()
        for name, field in schema.get("properties", {}).items()
    ]
    assert len(fields) > 300
    for name, field in fields:
        assert field.get("description", "").endswith("."), name
        for example in field["examples"]:
            assert example is not None or field["type"] == "null", name
            _validator(page, field).validate(example)
    operations = [operation for methods in page["paths"].values() for operation in methods.values()]
    parameters = [each for operation in operations for each in operation.get("parameters", ())]
    for each in (*parameters, *parts["headers"].values()):
        assert each["description"].endswith(".")
        assert each["example"]
    for operation in operations:
        assert operation["summary"]
        assert {*operation["tags"]} <= {tag["name"] for tag in page["tags"]}
        if "requestBody" in operation:
            body = operation["requestBody"]["content"]["application/json"]
            _validator(page, body["schema"]).validate(body["example"])


async def test_every_route_answers_and_fits_its_schemas(engine: RecordingEngine, page: Any) -> None:
    for method, path in GOOD:
        operation = page["paths"][route_of(path)[0]][method.lower()]
        body = GOOD[method, path]
        if body is not None:
            sent = operation["requestBody"]["content"]["application/json"]["schema"]
            _validator(page, sent).validate(body)
        answer = await Caller(engine).ask(method, path, body)
        assert answer.status == (204 if path == "/cache" else expected(path))
        if method == "GET":
            head = await Caller(engine).ask("HEAD", path)
            # Metrics and models differ from call to call.
            assert head.status == 200
            assert path[-7:] in ("metrics", "/models") or head.body == answer.body
        if path in REFUSING:
            continue
        described = operation["responses"][str(answer.status)]
        assert path != "/decode" or "x-compute-type" not in described["headers"]
        assert {"x-compute-type"} & answer.headers.keys() <= described["headers"].keys(), path
        if not answer.body:
            assert "content" not in described, path
            continue
        kind = answer.headers["Content-Type"].partition(";")[0]
        schema = described["content"][kind]
        if kind == "application/json":
            _validator(page, schema["schema"]).validate(json.loads(answer.body))


async def test_errors_and_wrong_requests_are_as_described(engine: RecordingEngine, page: Any) -> None:
    described = page["paths"]["/rerank"]["post"]
    assert "x-compute-type" in described["responses"]["200"]["headers"]
    error = described["responses"]["default"]["content"]["application/json"]["schema"]
    request = described["requestBody"]["content"]["application/json"]["schema"]
    for body in ({"query": 7, "documents": ["d"]}, {"documents": ["d"]}, []):
        assert not _validator(page, request).is_valid(body)
        answer = await Caller(engine).ask("POST", "/rerank", body)
        _validator(page, error).validate(json.loads(answer.body))
    good = {"query": "q", "documents": ["d", {"text": "e"}], "top_n": None}
    assert _validator(page, request).is_valid(good)
