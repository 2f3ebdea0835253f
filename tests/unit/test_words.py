"""One concept, one noun, the field's: words that this code gave up stay out of its names and sentences."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["scheduler", "pooling", "engine", "api", "bench"]

# The old name, without leading underscores, and what to say instead.
OLD_NAMES = {
    "after_prefix": "shared_prefix",
    "attach": "nothing: cached documents are scheduled like other work",
    "behind_linear": "epilogue_args",
    "carried": "prefill_kv",
    "carries": "prefill_kv",
    "carry": "prefill_kv",
    "everywhere": "full",
    "give_way": "take_short_slices",
    "kept": "cached, or pooled_positions",
    "kept_document": "CachedDocument",
    "keptdocument": "CachedDocument",
    "knows_float32": "supports_float32",
    "known": "cached",
    "known_sequence": "CacheHit or Duplicate",
    "knownsequence": "CacheHit or Duplicate",
    "on_device": "device_model",
    "ondevice": "DeviceModel",
    "place": "ResultSlot, position or index",
    "place_of": "inverse",
    "places": "slots, positions or indices",
    "scored_attached": "nothing: cached documents are scheduled like other work",
    "settle": "commit",
    "so_many": "the number's own name",
    "to_run": "num_new_tokens",
    "told": "reported",
    "trouble": "mismatch",
    "uses": "num_consumers",
    "whats_the_matter": "mismatch",
    "what_is_the_matter": "mismatch",
    "without_known": "split_cached",
}
OLD_PHRASES = ["so many", "what is the matter", "what's the matter", "gives way", "give way"]


def _files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def _names(source: str) -> Iterator[tuple[int, str]]:
    """Every name in the code with its line: variables, attributes, arguments, keywords, functions, classes,
    modules."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield from ((line, part) for part in name.split("."))
                if other is not None:
                    yield line, other
            case ast.ImportFrom(module=str(module)):
                yield from ((line, part) for part in module.split("."))
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from ((line, name) for name in names)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield line, name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield line, name


def _old_names(source: str) -> list[tuple[int, str]]:
    return sorted({(line, name) for line, name in _names(source) if name.strip("_").lower() in OLD_NAMES})


def _sentences(source: str) -> Iterator[tuple[int, str]]:
    """Comments, those of following lines joined, and docstrings."""
    comment, first, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#: ")
            if line == last + 1:
                comment += " " + text
            else:
                yield first, comment
                comment, first = text, line
            last = line
    yield first, comment
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text


def _old_phrases(source: str) -> list[tuple[int, str]]:
    return [
        (line, phrase)
        for line, text in _sentences(source)
        for phrase in OLD_PHRASES
        if phrase in " ".join(text.split()).lower()
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_is_of_the_old_dialect(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: say {OLD_NAMES[name.strip('_').lower()]}"
        for path in _files(room)
        for line, name in _old_names(path.read_text(encoding="utf-8"))
    ]
    found += [
        f"{path.relative_to(ROOT)}: the module's name: say {OLD_NAMES[path.stem]}"
        for path in _files(room)
        if path.stem in OLD_NAMES
    ]
    assert not found, f"{len(found)} names:\n" + "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_no_sentence_is_of_the_old_dialect(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase!r}"
        for path in _files(room)
        for line, phrase in _old_phrases(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"{len(found)} sentences:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "kept = 1",
        "a.place",
        "def f(*, uses): ...",
        "f(known=1)",
        "def settle(): ...",
        "async def give_way(): ...",
        "class OnDevice: ...",
        "class _KeptDocument: ...",
        "from maxsimd.carry import x",
        "import x as trouble",
        "def f():\n    nonlocal told",
        "[places for places in x]",
        "try: ...\nexcept E as trouble: ...",
        "match x:\n    case [*kept]: ...",
    ],
)
def test_an_old_name_is_noticed(planted: str) -> None:
    assert len(_old_names(planted)) == 1


@pytest.mark.parametrize(
    "planted",
    [
        "# as so many others",
        "x = 1  # What is the matter",
        "# it is of so\n# many",
        '"""Gives\nway."""',
        'def f():\n    """Threads\n    give way."""',
    ],
)
def test_an_old_phrase_is_noticed(planted: str) -> None:
    assert len(_old_phrases(planted)) == 1


def test_what_others_call_so_is_left_alone() -> None:
    """A word within a longer name, and in text that is no name, is none of ours."""
    source = 'keep_alive = unknown = placeholder = "kept"  # kept\nprint("so many")\n'
    assert _old_names(source) == []
    assert _old_phrases(source) == []
