"""The templates of docs/databases.md for Elasticsearch, OpenSearch and Vespa, filled in as these do."""

import json
import re
from pathlib import Path
from typing import Any

from plain import DOCUMENTS, LATE_INTERACTION, QUERY, RANKING, check_ranking, post

_PAGE = (Path(__file__).parents[3] / "docs" / "databases.md").read_text(encoding="utf-8")
_ELASTICSEARCH, _OPENSEARCH = map(json.loads, re.findall(r"```json\n(.*?)```", _PAGE, re.S))


def ranks_for_elasticsearch() -> None:
    template = _ELASTICSEARCH["service_settings"]["request"]
    filled = {"${query}": json.dumps(QUERY), "${input}": json.dumps(DOCUMENTS)}
    parser = _ELASTICSEARCH["service_settings"]["response"]["json_parser"]
    for url in RANKING:
        answer = post(url, "/rerank", _filled(template, filled))
        scores, indices = (_read(answer, parser[name]) for name in ("relevance_score", "reranked_index"))
        check_ranking(url, [*zip(indices, scores, strict=True)])
        assert _read(answer, parser["document_text"]) == [DOCUMENTS[index] for index in indices]


def ranks_for_opensearch() -> None:
    [action] = _OPENSEARCH["actions"]
    filled = {"${parameters.query}": QUERY, "${parameters.documents}": json.dumps(DOCUMENTS)}
    filled["${parameters.top_n}"] = str(len(DOCUMENTS))
    for url in RANKING:
        results = post(url, "/v1/rerank", _filled(action["request_body"], filled))["results"]
        # The connector casts these to Integer and Double.
        assert all(type(each["index"]) is int and type(each["relevance_score"]) is float for each in results)
        check_ranking(url, [(each["index"], each["relevance_score"]) for each in results])


def packs_bits_for_vespa() -> None:
    plain, packed = (
        post(LATE_INTERACTION, "/v1/multi-vector", {"input": QUERY, "embed_dtype": kind})["data"][0]
        for kind in ("float32", "ubinary")
    )
    for numbers, row in zip(plain["embeddings"], packed["embeddings"], strict=True):
        bits = "".join(f"{byte:08b}" for byte in bytes.fromhex(bytes(row).hex()))
        assert bits == "".join(str(int(number > 0)) for number in numbers)


def _filled(template: str, values: dict[str, str]) -> Any:
    for name, value in values.items():
        template = template.replace(name, value)
    return json.loads(template)


def _read(answer: Any, path: str) -> list[Any]:
    """The values at a path such as `$.results[*].document.text`."""
    rows, *names = path.removeprefix("$.").replace("[*]", "").split(".")
    found = []
    for value in answer[rows]:
        for name in names:
            value = value[name]
        found.append(value)
    return found
