"""`maxsimd rerank` and `score` over folders of pictures, PDFs and texts."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from maxsimd.api.cli import main
from maxsimd.engine import EngineConfig, SyncEngine
from maxsimd.engine.media import Picture, PictureError, PictureLimits, pages_of
from tests.checkpoints import visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.forked import run_command

QUERY = "what is this?"


def drawn(seed: int, size: tuple[int, int] = (300, 200)) -> Image.Image:
    """A picture of large areas, which JPEG, as PDFs have it, hardly changes."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    drawn(1).save(folder / "a.png")
    (folder / "inner").mkdir()
    drawn(2).save(folder / "inner" / "b.JPG", quality=95)
    first, *others = (drawn(seed) for seed in (3, 4, 5))
    first.save(folder / "report.pdf", save_all=True, append_images=others, resolution=150, quality=95)
    (folder / "notes.txt").write_text("a text among the pages", encoding="utf-8")
    (folder / "data.bin").write_bytes(b"\x00")
    (folder / ".hidden.png").write_bytes(b"no picture")
    return folder


NAMES = ["a.png", "inner/b.JPG", "notes.txt", "report.pdf page 1", "report.pdf page 2", "report.pdf page 3"]


def test_each_picture_page_and_text_of_a_folder_is_a_document(
    folder: Path, checkpoints: SharedCheckpoints
) -> None:
    checkpoint = checkpoints(visual.colpali)
    with SyncEngine(EngineConfig(model=checkpoint, dtype="float32"), progress=False) as engine:
        limits = PictureLimits()
        pages = [page.read(limits) for page in pages_of(folder / "report.pdf")]
        pictures = [Image.open(folder / name) for name in NAMES[:2]]
        expected = engine.score(QUERY, [*pictures, "a text among the pages", *pages]).scores
    options = ("--query", QUERY, "--documents", str(folder), "--dtype", "float32")
    ran = run_command("rerank", checkpoint, *options)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {each["id"]: each["score"] for each in found} == pytest.approx(
        dict(zip(NAMES, expected, strict=True)), abs=1e-5
    )
    assert [each["score"] for each in found] == pytest.approx(
        sorted(expected, reverse=True), rel=1e-6, abs=1e-5
    )
    assert "6 of 6 documents" in ran.stderr
    out = folder.parent / "scores.jsonl"
    run_command("score", checkpoint, *options, "--out", str(out))
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == NAMES


def test_a_page_of_a_pdf_is_drawn_as_it_looks(folder: Path) -> None:
    for page, seed in zip(pages_of(folder / "report.pdf"), (3, 4, 5), strict=True):
        picture = page.read(PictureLimits())
        original = np.asarray(drawn(seed)).astype(int)
        assert (picture.width, picture.height) == (300, 200)
        assert np.abs(picture.pixels.astype(int) - original).mean() < 4


def test_a_page_that_is_too_large_is_not_drawn(folder: Path) -> None:
    with pytest.raises(PictureError, match="is a page of 60,000 pixels; at most 50,000 are read"):
        pages_of(folder / "report.pdf")[0].read(PictureLimits(pixels=50_000))


def test_a_grey_page_has_three_channels(tmp_path: Path) -> None:
    drawn(6).convert("L").save(tmp_path / "grey.pdf", resolution=150)
    (page,) = pages_of(tmp_path / "grey.pdf")
    picture = page.read(PictureLimits())
    assert isinstance(picture, Picture)
    assert picture.pixels.shape == (200, 300, 3)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("broken.pdf", b"%PDF-1.4 broken", "broken.pdf cannot be read as a PDF"),
        ("data.bin", b"\x00", "there is no picture, PDF or text in"),
        ("latin.txt", b"\xe4", "latin.txt cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    words = ["rerank", "--query", QUERY, "--documents", str(tmp_path)]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 1
    assert message in ran.stderr.splitlines()[-1]
    ran = CliRunner().invoke(main, [*words, "--field", "a"])
    assert ran.exit_code == 2
    assert "--input-format and --field are for files, not for a folder" in ran.stderr
