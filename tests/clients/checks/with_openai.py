"""OpenAI's client."""

import json
import time

from openai import APIStatusError, OpenAI
from plain import BI_ENCODER, DOCUMENTS, QUERY, check_vectors, error_of

_MODEL = "text-embedding-3-small"
_CLIENT = OpenAI(base_url=BI_ENCODER + "/v1", api_key="none")


def embeds() -> None:
    answer = _CLIENT.embeddings.create(model=_MODEL, input=[QUERY, *DOCUMENTS])
    check_vectors([each.embedding for each in answer.data], [QUERY, *DOCUMENTS])
    assert answer.usage.prompt_tokens > 0


def embeds_in_floats_and_fewer_dimensions() -> None:
    answer = _CLIENT.embeddings.create(model=_MODEL, input=QUERY, encoding_format="float", dimensions=64)
    check_vectors([answer.data[0].embedding], [QUERY], dimensions=64)


def lists_models() -> None:
    names = [model.id for model in _CLIENT.models.list()]
    assert _MODEL in names, names
    assert _CLIENT.models.retrieve(_MODEL).id == _MODEL


def is_told_of_a_model_that_is_not_there() -> None:
    error = error_of(APIStatusError, lambda: _CLIENT.embeddings.create(model="no-such-model", input=QUERY))
    assert error.status_code == 404, error
    assert "no-such-model" in str(error), error


def runs_a_batch_job() -> None:
    bodies = [{"model": _MODEL, "input": text} for text in DOCUMENTS]
    lines = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": body})
        for i, body in enumerate(bodies)
    ]
    given = _CLIENT.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert _CLIENT.files.retrieve(given.id).filename == "requests.jsonl"
    batch = _CLIENT.batches.create(
        input_file_id=given.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"job": "test"}
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = _CLIENT.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"job": "test"}), batch
    assert batch.request_counts.completed == len(DOCUMENTS), batch
    assert batch.id in [each.id for each in _CLIENT.batches.list()]
    results = [json.loads(line) for line in _CLIENT.files.content(batch.output_file_id).text.splitlines()]
    results.sort(key=lambda each: each["custom_id"])
    vectors = [each["response"]["body"]["data"][0]["embedding"] for each in results]
    check_vectors(vectors, DOCUMENTS)
    for file in [each.id for each in _CLIENT.files.list()]:
        assert _CLIENT.files.delete(file).deleted
    assert error_of(APIStatusError, lambda: _CLIENT.files.retrieve(given.id)).status_code == 404
    assert error_of(APIStatusError, lambda: _CLIENT.batches.cancel(batch.id)).status_code == 409
