"""Pictures are read as people see them, in every mode and orientation, and from base64; no file does harm."""

import base64
import struct
import sys
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from maxsimd.engine import media

LIMITS = media.PictureLimits(file_bytes=1 << 20, pixels=1_000_000)
MOST_BYTES = 1_000
Chunk = tuple[bytes, bytes]


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def drawn(height: int = 5, width: int = 7, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def read(data: bytes) -> NDArray[np.uint8]:
    return media.decoded(data, LIMITS).pixels


def on_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def test_exif_orientation_is_applied() -> None:
    pixels = drawn()
    turned = {
        1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1), 7: pixels[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(pixels),
    }  # fmt: skip
    for orientation, expected in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert np.array_equal(read(file_of(Image.fromarray(pixels), exif=exif)), expected), orientation


def test_what_is_transparent_stands_on_white() -> None:
    pixels = drawn(channels=4)
    alpha = pixels[..., 3:].astype(float) / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    found = read(file_of(Image.fromarray(pixels)))
    assert np.abs(found - expected).max() <= 1
    grey = Image.fromarray(pixels[..., 0]).convert("LA")
    grey.putalpha(0)
    assert (read(file_of(grey)) == 255).all()
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert read(file_of(image, transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    grey16 = Image.fromarray(np.array([[1000, 1001]], dtype=np.uint16))
    transparent = _with_chunks((b"tRNS", struct.pack(">H", 1000)), image=grey16)
    assert read(transparent).tolist() == [[[255] * 3, [4] * 3]]
    rgb = struct.pack(">3H", 1000, 2000, 3000)
    for depth, kind, rows, key, second in (
        (2, 0, b"\x00\x60", struct.pack(">H", 1), 170),
        (4, 0, b"\x00\x12", struct.pack(">H", 1), 34),
        (16, 2, b"\x00" + rgb + bytes(6), rgb, 0),
    ):
        data = _png(2, 1, rows, (b"tRNS", key), depth=depth, kind=kind)
        assert read(data).tolist() == [[[255] * 3, [second] * 3]], depth
    data = bytearray(file_of(Image.new("P", (2, 2)), "GIF"))
    data[6:10] = struct.pack("<HH", 4, 3)
    found = read(bytes(data))
    assert found.shape == (3, 4, 3)
    assert [(found[:2, :2] == 0).all(), (found[2:] == 255).all(), (found[:, 2:] == 255).all()] == [True] * 3


def test_sixteen_bits_are_scaled_and_first_frames_read() -> None:
    values = np.array([[0, 127, 128, 257], [32_768, 65_406, 65_407, 65_535]], dtype=np.uint16)
    found = read(file_of(Image.fromarray(values)))
    assert found[..., 0].tolist() == [[0, 0, 0, 1], [128, 254, 255, 255]]
    assert (found == found[..., :1]).all()
    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue")]
    for format in ("GIF", "PNG", "WEBP"):
        data = file_of(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        assert read(data)[0, 0].tolist() == [255, 0, 0], format


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [False, True])
def test_webp_is_read_as_by_pillow_beside_other_threads(mode: str, lossless: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file_of(Image.fromarray(drawn(61, 43, len(mode))), "WEBP", lossless=lossless, exif=exif)
    with Image.open(BytesIO(data)) as image:
        np.testing.assert_array_equal(read(data), np.asarray(on_white(ImageOps.exif_transpose(image))))
    if sys.platform == "linux":
        assert (media.still_webp(data, LIMITS).size, media.still_webp(data, LIMITS).mode) == ((43, 61), mode)
    for damaged in (b"RIFF", data[:12], data[: len(data) // 2]):
        assert media.still_webp(damaged, LIMITS) is None


# Those of GIF hold a palette, whatever they are made of.
NO_SUCH_FILES = {"PNG": ["CMYK"], "BMP": ["CMYK"], "JPEG": ["P", "RGBA"], "GIF": ["RGB", "RGBA", "CMYK"]}


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_a_picture_of_any_mode_is_read_as_by_pillow(format: str) -> None:
    soft = Image.fromarray(drawn(30, 40)).resize((500, 350))
    for mode in ("RGB", "L", "P", "RGBA", "1", "CMYK"):
        if mode in NO_SUCH_FILES.get(format, ()):
            continue
        data = file_of(soft.convert(mode), format)
        with Image.open(BytesIO(data)) as image:
            picture = media.decoded(data, media.PictureLimits())
            np.testing.assert_array_equal(picture.pixels, np.asarray(on_white(image)), err_msg=mode)
            assert (picture.width, picture.height, picture.pixels.dtype) == (500, 350, np.uint8)
    for length in (1, 8, 20, len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(media.PictureError):
            read(data[:length])


@settings(max_examples=50)
@given(st.data(), st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]))
def test_a_damaged_file_is_read_or_refused(data: st.DataObject, format: str) -> None:
    damaged = bytearray(file_of(Image.fromarray(drawn(20, 20)), format))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        picture = media.decoded(bytes(damaged), LIMITS)
    except media.PictureError:
        return
    assert picture.width * picture.height <= LIMITS.pixels


def test_an_image_that_pillow_has_not_read_yet_is_read_once_by_several_threads() -> None:
    pixels = drawn(600, 800)
    image = Image.open(BytesIO(file_of(Image.fromarray(pixels))))
    with ThreadPoolExecutor(4) as pool:
        for each in pool.map(lambda _: media.picture_of_pillow(image, LIMITS), range(4)):
            np.testing.assert_array_equal(each.pixels, pixels)


def test_what_is_no_picture_or_a_large_animation_is_refused() -> None:
    tiff = file_of(Image.fromarray(drawn()), "TIFF")
    for data in (b"", b"\0", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe", tiff):
        with pytest.raises(media.PictureError, match="be read; send PNG, JPEG, WEBP, GIF or BMP"):
            read(data)
    frames = [Image.new("RGB", (1600, 1300), color) for color in ("red", "blue")]
    data = file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    with pytest.raises(media.PictureError, match="is an animation of 1,600 x 1,300 pixels"):
        media.decoded(data, media.PictureLimits())


def _chunks(*chunks: Chunk) -> bytes:
    return b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def _with_chunks(*chunks: Chunk, image: Image.Image) -> bytes:
    data = file_of(image)
    return data[:33] + _chunks(*chunks) + data[33:]


def _png(width: int, height: int, rows: bytes, *chunks: Chunk, depth: int = 8, kind: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = ((b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + _chunks(*parts)


def test_files_that_cost_more_than_they_show_are_refused() -> None:
    image = Image.fromarray(drawn(8, 8))
    profile = (b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000)))
    assert np.array_equal(read(_with_chunks(profile, image=image)), np.asarray(image))
    for chunks in ([profile] * 2, [(b"abCd", b"")] * 1_001):
        with pytest.raises(media.PictureError, match="too many chunks"):
            read(_with_chunks(*chunks, image=image))
    jpeg = file_of(image, "JPEG", progressive=True)
    assert read(jpeg).shape == (8, 8, 3)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    with pytest.raises(media.PictureError, match="too many scans"):
        read(jpeg[:-2] + scan * 30 + jpeg[-2:])
    with pytest.raises(media.PictureError, match="bytes of EXIF"):
        read(file_of(image, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0" + bytes(70_000)))
    gif = file_of(image.convert("P"), "GIF")
    at = gif.index(b",\0\0\0\0")
    for many in (
        jpeg[:2] + b"\xff\xe5\0\2" * 200_000 + jpeg[2:],
        gif[:at] + b"!\xfe" + b"\1a" * 250_000 + b"\0" + gif[at:],
    ):
        assert len(many) < LIMITS.file_bytes
        with pytest.raises(media.PictureError, match="too many parts"):
            read(many)
    # A pixel for each line, which is filled up one by one.
    head = struct.pack("<IiiHHIIiiII", 40, 1_000, 2_001, 1, 8, 1, 0, 0, 0, 256, 0) + bytes(1024)
    bmp = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(head)) + head + b"\1\0\0\0" * 2_001
    with pytest.raises(media.PictureError, match="as compressed BMP may have 2,000,000"):
        media.decoded(bmp, media.PictureLimits())
    canvas = b"RIFF" + struct.pack("<I8sI4x", 22, b"WEBPVP8X", 10) + b"\xff\x31\x00" * 2
    with pytest.raises(media.PictureError, match="has 12,800 x 12,800 pixels"):
        read(canvas)


def test_bombs_and_too_long_pictures_are_refused_unread() -> None:
    huge = f"data:image/png;base64,{'A' * 50_000_000}"
    bombs = [_png(*size, b"\0" * 100) for size in ((1_001, 1_000), (2**31 - 1, 2**31 - 1))]
    for refuse, message in (
        *((partial(read, bomb), "pixels") for bomb in bombs),
        (partial(media.bytes_of_data_url, huge, MOST_BYTES), "has more than 1,000 bytes"),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(media.PictureError, match=message):
                refuse()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
    for size, long in (((1, 200), (1, 201)), ((400, 2), (401, 2))):
        assert read(file_of(Image.new("RGB", size))).shape == (size[1], size[0], 3)
        with pytest.raises(media.PictureError, match=f"{long[0]} x {long[1]} pixels, but may be at most 200"):
            read(file_of(Image.new("RGB", long)))


def test_the_digest_is_of_pixels_and_shape_which_are_checked() -> None:
    pixels = drawn(4, 6)
    digests = {media.decoded(file_of(Image.fromarray(pixels), f), LIMITS).digest for f in ("PNG", "BMP")}
    assert digests == {media.Picture(pixels).digest}
    others = [pixels.reshape(6, 4, 3), pixels.reshape(3, 8, 3), pixels[:, ::-1], drawn(4, 6, seed=1)]
    assert len(digests | {media.Picture(each).digest for each in others}) == 5
    for wrong in (pixels / 255, pixels[..., 0], pixels[..., :2], pixels[:0]):
        with pytest.raises(media.PictureError, match="give uint8"):
            media.Picture(wrong).read(LIMITS)


@settings(max_examples=40)
@given(st.binary(min_size=1, max_size=100))
def test_base64_is_read_in_all_its_spellings(data: bytes) -> None:
    plain = base64.b64encode(data).decode()
    url_safe = base64.urlsafe_b64encode(data).decode()
    for text in (plain, plain.rstrip("="), url_safe, f" {plain[:4]}\n{plain[4:]}\t"):
        assert media.bytes_of_base64(text, MOST_BYTES) == data
    png = "data:image/png;base64,"
    for head in (png, png.upper(), "data:;base64,", "data:image/jpeg;q=1;base64,"):
        assert media.bytes_of_data_url(head + plain, MOST_BYTES) == data


def test_what_is_no_base64_no_data_url_or_too_large_is_refused() -> None:
    for text in ("*", "abc$", "a", "ä", "AAAA====A"):
        with pytest.raises(media.PictureError, match="is no base64"):
            media.bytes_of_base64(text, MOST_BYTES)
    for url, said in (
        *(("data:image/png,abc", "is no data URL"), ("http://example.com/a.png", "is no data URL")),
        ("data:image/png;base64", "is no data URL"),
        ("data:text/html;base64,AAAA", "is of the media type text/html"),
        *(("data:image/png;base64,", "is empty"), (f"data:{'a' * 100_000}", "is no data URL")),
    ):
        with pytest.raises(media.PictureError, match=said):
            media.bytes_of_data_url(url, MOST_BYTES)
    assert len(media.bytes_of_base64(base64.b64encode(bytes(MOST_BYTES)).decode(), MOST_BYTES)) == MOST_BYTES
    with pytest.raises(media.PictureError, match="has 1,001 bytes, but may have 1,000"):
        media.bytes_of_base64(base64.b64encode(bytes(MOST_BYTES + 1)).decode(), MOST_BYTES)
    file = file_of(Image.fromarray(drawn()))
    with pytest.raises(media.PictureError, match=rf"has {len(file)} bytes, but may have {len(file) - 1}"):
        media.decoded(file, media.PictureLimits(file_bytes=len(file) - 1))
