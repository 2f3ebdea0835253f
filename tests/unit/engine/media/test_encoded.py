"""Files that come as base64 and data URLs."""

import base64
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine.media import PictureError, bytes_of_base64, bytes_of_data_url

MOST = 1_000


@given(st.binary(min_size=1, max_size=100))
def test_base64_is_read_in_all_its_spellings(data: bytes) -> None:
    plain = base64.b64encode(data).decode()
    for text in (
        plain,
        plain.rstrip("="),
        base64.urlsafe_b64encode(data).decode(),
        f" {plain[:4]}\n{plain[4:]}\t",
    ):
        assert bytes_of_base64(text, MOST) == data
    for head in (
        "data:image/png;base64,",
        "DATA:IMAGE/PNG;BASE64,",
        "data:;base64,",
        "data:image/jpeg;q=1;base64,",
    ):
        assert bytes_of_data_url(head + plain, MOST) == data


@pytest.mark.parametrize("text", ["*", "abc$", "a", "ä", "AAAA====A"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(PictureError, match="is no base64"):
        bytes_of_base64(text, MOST)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png,abc", "is no data URL"),
        ("http://example.com/a.png", "is no data URL"),
        ("data:image/png;base64", "is no data URL"),
        ("data:text/html;base64,AAAA", "is of the media type text/html"),
        ("data:image/png;base64,", "is empty"),
        (f"data:{'a' * 100_000}", "is no data URL"),
    ],
)
def test_other_urls_are_refused(url: str, said: str) -> None:
    with pytest.raises(PictureError, match=said):
        bytes_of_data_url(url, MOST)


def test_what_is_too_large_is_refused_at_once() -> None:
    assert len(bytes_of_base64(base64.b64encode(bytes(MOST)).decode(), MOST)) == MOST
    with pytest.raises(PictureError, match="has 1,001 bytes, but may have 1,000"):
        bytes_of_base64(base64.b64encode(bytes(MOST + 1)).decode(), MOST)
    huge = f"data:image/png;base64,{'A' * 50_000_000}"
    tracemalloc.start()
    try:
        with pytest.raises(PictureError, match="has more than 1,000 bytes"):
            bytes_of_data_url(huge, MOST)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
