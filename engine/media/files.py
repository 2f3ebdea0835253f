"""Pictures that lie in files of the caller's own: pictures, and the pages of PDFs."""

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxsimd.engine.media.decoding import PictureLimits, decoded
from maxsimd.engine.media.errors import PictureError
from maxsimd.engine.media.picture import Picture

# PDFs have no pixels: a page is drawn with as many an inch. An A4 page is 1240 x 1754 then.
_PIXELS_AN_INCH = 150
_POINTS_AN_INCH = 72
# PDFium draws one page at a time.
_DRAWING = threading.Lock()


@dataclass(frozen=True, slots=True)
class PictureAt:
    """A picture in a file, read when it is needed."""

    path: Path

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise PictureError(f"cannot be read: {error}") from None
        return decoded(data, limits)


@dataclass(frozen=True, slots=True)
class PdfPage:
    """A page of a PDF, counted from 0, drawn when it is needed."""

    path: Path
    page: int

    def read(self, limits: PictureLimits) -> Picture:
        """Raises PictureError."""
        from pypdfium2 import PdfDocument, PdfiumError

        with _DRAWING:
            try:
                with PdfDocument(self.path) as document:
                    page = document[self.page]
                    scale = _PIXELS_AN_INCH / _POINTS_AN_INCH
                    pixels = page.get_width() * page.get_height() * scale**2
                    if pixels > limits.pixels:
                        raise PictureError(
                            f"is a page of {pixels:,.0f} pixels; at most {limits.pixels:,} are read"
                        )
                    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
                    drawn = np.array(bitmap.to_numpy())
                    page.close()
            except PdfiumError as error:
                raise PictureError(f"is a page that cannot be drawn: {error}") from None
        grey = drawn.ndim == 2 or drawn.shape[2] == 1
        return Picture(np.repeat(drawn.reshape(*drawn.shape[:2], 1), 3, axis=2) if grey else drawn[:, :, :3])


def pages_of(path: Path) -> list[PdfPage]:
    """The pages of a PDF. Raises PictureError for a file that is none, or needs a password, and ImportError
    without pypdfium2."""
    from pypdfium2 import PdfDocument, PdfiumError

    with _DRAWING:
        try:
            with PdfDocument(path) as document:
                count = len(document)
        except (PdfiumError, OSError) as error:
            raise PictureError(f"cannot be read as a PDF: {error}") from None
    return [PdfPage(path, number) for number in range(count)]
