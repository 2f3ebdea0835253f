"""What the headers say of a body, before any of it is read: its length and its encoding. Functions of their
input."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from maxsimd.api.failures import ApiError, body_too_large, unknown_encoding

# How a body is compressed; None where it is not.
Encoding: TypeAlias = Literal["gzip", "deflate"]
# By the names that clients give them (RFC 9110, section 8.4.1).
_ENCODINGS: dict[str, Encoding | None] = {
    "": None,
    "identity": None,
    "gzip": "gzip",
    "x-gzip": "gzip",
    "deflate": "deflate",
}


def encoding_of(headers: Mapping[str, str]) -> Encoding | None:
    """Raises ApiError (415) for an encoding that is not taken, and for several one upon the other."""
    given = (value for name, value in headers.items() if name.lower() == "content-encoding")
    named = ", ".join(given).strip().lower()
    if named not in _ENCODINGS:
        raise unknown_encoding()
    return _ENCODINGS[named]


def refusal(headers: Mapping[str, str], most_bytes: int) -> ApiError | None:
    """Why a body need not be waited for, of which at most `most_bytes` are taken, decompressed; None where it
    is to be read."""
    try:
        is_compressed = encoding_of(headers) is not None
    except ApiError as error:
        return error
    # A compressed body is as long as it turns out to be.
    length = headers.get("content-length", "")
    if not is_compressed and length.isdecimal() and int(length) > most_bytes:
        return body_too_large()
    return None
