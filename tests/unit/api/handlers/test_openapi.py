"""/openapi.json: valid, complete, and true of what the routes answer."""

import json
import re
from typing import Any

import jsonschema
import pytest_asyncio

from maxsimd.api.handlers.operating import MODEL_PATH
from maxsimd.api.handlers.routes import ROUTES
from tests.unit.calling_handlers import GOOD, REFUSING, Caller, RecordingEngine


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(engine: RecordingEngine) -> Any:
    return json.loads((await Caller(engine).ask("GET", "/openapi.json")).body)


def _validator(page: Any, schema: Any) -> Any:
    return jsonschema.Draft202012Validator({**schema, "components": page["components"]})


async def test_it_has_every_route(page: Any) -> None:
    described = {(path, method.upper()) for path, methods in page["paths"].items() for method in methods}
    offered = {(path, method) for path, methods in ROUTES.items() for method in methods if method != "HEAD"}
    assert described == offered
    names = [operation["operationId"] for methods in page["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


async def test_all_references_are_there_and_all_schemas_are_such(page: Any) -> None:
    for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(page)):
        assert name in page["components"]["schemas"]
    for schema in page["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_requests_and_answers_fit_their_schemas(engine: RecordingEngine, page: Any) -> None:
    for method, path in (each for each in GOOD if each[1] not in REFUSING):
        operation = page["paths"][path][method.lower()]
        body = GOOD[method, path]
        if body is not None:
            sent = operation["requestBody"]["content"]["application/json"]["schema"]
            _validator(page, sent).validate(body)
        answer = await Caller(engine).ask(method, path, body)
        described = operation["responses"][str(answer.status)]
        if not answer.body:
            assert "content" not in described, path
            continue
        kind = answer.headers["Content-Type"].partition(";")[0]
        schema = described["content"][kind]
        if kind == "application/json":
            _validator(page, schema["schema"]).validate(json.loads(answer.body))


async def test_errors_fit_theirs(engine: RecordingEngine, page: Any) -> None:
    schema = page["paths"]["/rerank"]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    for body in ({}, {"query": 7}, []):
        answer = await Caller(engine).ask("POST", "/rerank", body)
        _validator(page, schema).validate(json.loads(answer.body))


async def test_a_wrong_request_does_not_fit(page: Any) -> None:
    schema = page["paths"]["/rerank"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = _validator(page, schema)
    assert not validator.is_valid({"query": 7, "documents": ["d"]})
    assert not validator.is_valid({"documents": ["d"]})
    assert validator.is_valid({"query": "q", "documents": ["d", {"text": "e"}], "top_n": None})


async def test_models_by_their_names_are_described(page: Any) -> None:
    (parameter,) = page["paths"][MODEL_PATH]["get"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("name", "path", True)
