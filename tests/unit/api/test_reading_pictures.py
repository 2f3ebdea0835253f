"""Content with pictures as clients send it: which part is which, and what is refused."""

import pytest

from maxsimd.api import reading
from maxsimd.api.reading_pictures import content_of, each_picture, has_pictures
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import Content, EncodedPicture, PictureUrl

DATA = "data:image/png;base64,AAAA"
URL = "https://example.com/a.png"
PICTURE, LINK = EncodedPicture(DATA), PictureUrl(URL)


def test_parts_are_read_in_their_order() -> None:
    for content, parts in (
        ({"image": DATA}, [PICTURE]),
        ({"image": "AAAA"}, [EncodedPicture("AAAA")]),
        ({"image": URL}, [LINK]),
        ({"image": {"url": URL}}, [LINK]),
        ({"image": "file:///a.png"}, [PictureUrl("file:///a.png")]),
        ({"text": "a", "image": DATA}, [PICTURE, "a"]),
        ({"type": "image_url", "image_url": {"url": DATA}}, [PICTURE]),
        ({"type": "input_image", "image_url": DATA}, [PICTURE]),
        ({"content": [{"type": "image_url", "image_url": URL}, {"type": "text", "text": "a"}]}, [LINK, "a"]),
        ({"content": ["a", {"image": DATA}, {"type": "input_text", "text": "b"}]}, ["a", PICTURE, "b"]),
        ({"content": [{"type": "image_base64", "image_base64": DATA}]}, [PICTURE]),
        ({"content": [{"text": "a", "image": "AAAA"}]}, [EncodedPicture("AAAA"), "a"]),
        # Whatever a text looks like, it is a text.
        ({"content": [{"type": "text", "text": URL}, {"image": DATA}]}, [URL, PICTURE]),
    ):
        assert has_pictures(content)
        assert content_of(content, "documents[0]", "documents") == Content.of(parts)
        assert reading.as_items([content], "documents") == [Content.of(parts)]


def test_what_only_looks_like_a_picture_is_text() -> None:
    for content in (
        {"text": URL},
        {"content": DATA},
        {"content": [{"type": "text", "text": "a"}]},
        {"content": None},
    ):
        assert not has_pictures(content)
        assert reading.as_items([URL, DATA], "documents") == [URL, DATA]


def test_what_is_no_picture_is_refused_by_its_name() -> None:
    for content, message in (
        ({"image": None, "image_url": 7}, "documents[0] has no picture"),
        ({"image": DATA, "image_url": DATA}, "documents[0] has several pictures"),
        ({"image_url": "AAAA"}, "documents[0] has a URL that cannot be read"),
        ({"image": {"url": "AAAA"}}, "documents[0] has a URL that cannot be read"),
        ({"image": {"bytes": "AAAA"}}, "documents[0] has no picture"),
        ({"type": "image_url"}, "documents[0] is neither a text nor a picture"),
        ({"type": "video_url", "video_url": URL}, "documents[0] is neither a text nor a picture"),
        ({"content": [{"image": DATA}, 7]}, "documents[0].content[1] is neither a text nor a picture"),
        ({"content": [{"image": DATA}, {}]}, "documents[0].content[1] is neither a text nor a picture"),
        ({"content": [{"image": DATA}, {"type": "other", "text": "a"}]}, "neither a text nor a picture"),
        ({"image": DATA, "content": []}, "has content parts and something beside them"),
        ({"type": "image_url", "content": []}, "neither a text nor"),
        ({"image": DATA, "content": [{"type": "text", "text": "a"}]}, "content parts and something beside"),
        ({"text": "a", "content": [{"image": DATA}]}, "content parts and something beside"),
        ({"text": "a", "video": URL}, "neither a text nor a picture"),
        ({"text": "a", "image": DATA, "audio": URL}, "neither a text nor a picture"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            reading.as_items([content], "documents")
        assert message in str(raised.value)
        assert raised.value.param == "documents"


def test_an_object_of_pictures_alone_stands_for_a_list() -> None:
    two = {"content": [{"image": DATA}, {"type": "image_url", "image_url": {"url": URL}}]}
    assert each_picture(two) == two["content"]
    assert reading.as_items(two, "documents") == [Content.of([PICTURE]), Content.of([LINK])]
    assert reading.as_items([two], "documents") == [Content.of([PICTURE, LINK])]
    for other in ({"content": [{"image": DATA}]}, {"content": [{"image": DATA}, "a"]}, "a", {"image": DATA}):
        assert each_picture(other) is None


def test_inputs_to_embed_may_have_pictures() -> None:
    assert reading.as_inputs(["a", {"image": DATA}], 5) == ["a", Content.of([PICTURE])]
    reading.check_token_ids([Content.of([PICTURE])], accepted=False)
