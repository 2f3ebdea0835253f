"""docs/clients.md has an example of each client, and its table says what the examples do."""

import re
from dataclasses import dataclass

from tests.clients.catalogue import CLIENTS
from tests.clients.page import CURL, PAGE, RAG, URL, Example, examples
from tests.clients.servers import MODELS

TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = examples()
SHOWN = {client.name for client in CLIENTS} - {"with_schemathesis"}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: the anchor it links to, and the base URL, or None for a client without one."""

    anchor: str
    url: str | None


def _rows() -> list[Row]:
    table = TEXT.split("\n## Base URLs\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| \[.+?\]\(#([\w-]+)\).*?\| .*? \| .*? \| (.+?) \| .+ \|$", table, re.MULTILINE)
    return [Row(anchor, None if url == "none" else url.strip("`")) for anchor, url in lines]


def _sections() -> dict[str, str]:
    """What stands below each heading, by the anchor that the heading has."""
    parts = re.split(r"^#{2,3} (.+)$", TEXT, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in parts[1::2]]
    assert len(set(anchors)) == len(anchors)
    return dict(zip(anchors, parts[2::2], strict=True))


def _examples_of(section: str) -> list[Example]:
    return [example for example in EXAMPLES if example.code in section]


def test_each_client_has_an_example_and_each_block_a_client() -> None:
    assert {example.client for example in EXAMPLES} == SHOWN | {CURL}
    blocks = re.findall(r"^```\w+\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert blocks == ["maxsimd serve\n", *(example.code for example in EXAMPLES)]
    assert not [name for name in MODELS[1:] for example in EXAMPLES if name in example.code]


def test_each_retrieval_block_is_an_example_of_both_models() -> None:
    text, shown = RAG.read_text(encoding="utf-8"), examples(page=RAG)
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks == [example.code for example in shown]
    assert {example.client for example in shown} == {"with_langchain_cohere", "with_llama_index"}
    for example in shown:
        assert all(part in example.code for part in (f'"{URL}"', '"embed"', '"rerank"'))


def test_each_row_of_the_table_has_examples_with_its_url() -> None:
    sections = _sections()
    rows = _rows()
    assert len(rows) == TEXT.split("\n## Base URLs\n")[1].split("\n## ")[0].count("\n| [")
    for row in rows:
        shown = _examples_of(sections[row.anchor])
        assert shown, row
        if row.url is None:
            assert not [example for example in shown if URL in example.code], row
        else:
            # What follows the URL ends it; in a shell a route does.
            end = "/v1/" if shown[0].client == CURL else '"'
            assert [example for example in shown if row.url + end in example.code], row


def test_each_example_uses_no_other_base_url() -> None:
    sections = _sections()
    rows = _rows()
    in_sections = [one for anchor in {row.anchor for row in rows} for one in _examples_of(sections[anchor])]
    assert sorted(in_sections, key=lambda one: one.line) == EXAMPLES
    for anchor in {row.anchor for row in rows} - {CURL}:
        used = {
            url
            for example in _examples_of(sections[anchor])
            for url in re.findall(rf'"({re.escape(URL)}[^"]*)"', example.code)
        }
        assert used == {row.url for row in rows if row.anchor == anchor and row.url}, anchor
