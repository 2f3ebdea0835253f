"""OpenAI's client."""

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
