"""Strange requests, as hypothesis draws them: HTTP, or nearly, with JSON in it, or nearly."""

import base64
import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_from_bytes

import msgspec
from hypothesis import strategies as st

from maxsimd.api import wire, wire_cohere, wire_reranks, wire_tei, wire_voyage
from maxsimd.api.handlers.routes import ROUTES
from tests.unit.calling_handlers import GOOD


@dataclass(frozen=True, slots=True)
class Strange:
    """A request's bytes. To one that is not `complete` a server may wait for more."""

    data: bytes
    complete: bool
    method: str = "POST"


# Of all bodies, requests and answers.
_FIELDS = sorted(
    {
        name
        for module in (wire, wire_cohere, wire_reranks, wire_tei, wire_voyage)
        for struct in vars(module).values()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        for name in struct.__struct_encode_fields__
    }
)
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", "a", "\ud800", "\0", "[MASK] [SEP]", "🙂" * 20, "e\u0301" * 30]),
    st.builds(lambda word, count: word * count, st.text(min_size=1, max_size=6), st.integers(1, 20_000)),
)
_NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0]),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.dictionaries(st.one_of(st.sampled_from(_FIELDS), st.text(max_size=8)), inner, max_size=5),
    ),
    max_leaves=20,
)
# Of the vectors of the model that is served here, and two of these in float16.
_DIM = 32
_HALVES = base64.b64encode(b"\x00\x2e" * 2 * _DIM).decode()
# A PNG of 2 x 2 pixels, and it beside a text.
_PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAADUlEQVR4nGP4z4AA/wEOAAH/OF9wGgAAAABJRU5ErkJggg=="
_URL = f"data:image/png;base64,{_PICTURE}"
_PARTS = [{"type": "text", "text": "a text"}, {"type": "image_url", "image_url": {"url": _URL}}]
_VECTORS = {"embedding": _HALVES, "dtype": "float16", "shape": [2, _DIM]}
# What a body is meant for, and one that is accepted there, or would be by another model.
_USUAL: list[tuple[str, dict[str, Any]]] = [
    *((path, body) for (method, path), body in GOOD.items() if method == "POST"),
    ("/rerank", {"query": "how is a file read", "documents": ["one text", "another", "a third one"]}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}),
    ("/predict", {"inputs": [["a", "b"]]}),
    ("/rerank", {"query": "a", "documents": [_VECTORS]}),
    ("/score", {"queries": {"embedding": [[0.1] * _DIM]}, "documents": [{"embedding": [0.2] * _DIM}, "b"]}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a text"}]}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": _PARTS}]}),
    ("/rerank", {"query": "a", "documents": [{"image": _PICTURE}, "b", {"text": "c", "image": _PICTURE}]}),
    ("/score", {"queries": {"image": _PICTURE}, "documents": ["b", {"content": _PARTS}], "explain": "maps"}),
    ("/embeddings", {"input": [_URL], "modality": "image"}),
    ("/v2/embed", {"images": [_URL], "input_type": "image"}),
    ("/v1/multimodalembeddings", {"inputs": [{"content": _PARTS}], "input_type": "document"}),
]
_LONGEST = 9 << 20


def _changed(usual: tuple[str, dict[str, Any]], changes: dict[str, Any], many: int) -> tuple[str, bytes]:
    """A usual request with other values, or with its lists repeated."""
    path, body = usual
    repeated = {name: value * many if isinstance(value, list) else value for name, value in body.items()}
    return path, json.dumps(repeated | changes).encode()[:_LONGEST]


_FITTING = st.builds(
    _changed,
    st.sampled_from(_USUAL),
    st.one_of(st.just({}), st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=2)),
    st.sampled_from([1, 1, 1, 1, 7, 100, 3000]),
)
_BODIES = st.one_of(
    st.builds(lambda value: json.dumps(value).encode()[:_LONGEST], _VALUES),
    st.builds(
        lambda opening, depth: b'{"query": "a", "documents": ' + opening * depth,
        st.sampled_from([b"[", b'{"a":', b'[{"text":', b"[["]),
        st.integers(1, 100_000),
    ),
    st.builds(
        lambda digits: b'{"query": "a", "documents": ["b"], "top_n": ' + b"9" * digits + b"}",
        st.integers(1, 9999),
    ),
    st.builds(
        lambda seed, size: random.Random(seed).randbytes(size),
        st.integers(0, 1 << 32),
        st.one_of(st.integers(0, 2000), st.integers(0, 900_000)),
    ),
    st.builds(
        lambda body, end: json.dumps(body[1]).encode()[:end], st.sampled_from(_USUAL), st.integers(0, 60)
    ),
    st.binary(max_size=300),
)
_NAMES = st.one_of(
    st.sampled_from(
        [
            *(
                "content-type",
                "content-encoding",
                "accept",
                "expect",
                "x-request-id",
                "origin",
                "range",
                "te",
            ),
            *("authorization", "accept-encoding", "connection", "upgrade", "cookie", "x-forwarded-for"),
        ]
    ),
    st.text("abcdefghijklmnopqrstuvwxyz-_!#$%&'*+.^`|~0123456789", min_size=1, max_size=20),
)
_HEADER_VALUES = st.one_of(
    st.sampled_from(
        [
            *("application/json", "text/plain", "gzip", "br", "deflate, gzip", "100-continue", "close"),
            *("websocket", "", "x" * 20_000, "Bearer x", "*", "bytes=0-1"),
        ]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60),
)
_ROUTES = st.sampled_from(sorted(ROUTES))
_PATHS = st.one_of(
    *(_ROUTES, _ROUTES),
    st.builds(lambda path, end: path + end, _ROUTES, st.sampled_from(["/", "?a=b", "%00", "//", "/.."])),
    st.builds(lambda raw: "/" + quote_from_bytes(raw, safe="/%?#&=;:@+$,"), st.binary(max_size=60)),
    st.builds(lambda count: "/" + "a" * count, st.integers(1, 20_000)),
)
_METHODS = st.sampled_from(
    ["POST"] * 12 + ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"]
)


@st.composite
def requests(draw: st.DrawFn) -> Strange:
    """One request, of whose bytes some may be changed."""
    method = draw(_METHODS)
    path, body = draw(st.one_of(_FITTING, _FITTING, st.tuples(_PATHS, _BODIES)))
    headers = draw(st.lists(st.tuples(_NAMES, _HEADER_VALUES), max_size=4))
    if draw(st.integers(0, 30)) == 0:
        headers *= 60
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    if draw(st.integers(0, 9)) == 0:
        lines.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
    data = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    if draw(st.integers(0, 7)):
        return Strange(data, True, method)
    changed = bytearray(data)
    for position, byte in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(-1, 255)), max_size=8)
    ):
        changed[position : position + 1] = b"" if byte < 0 else bytes([byte])
    return Strange(bytes(changed), False, method)
