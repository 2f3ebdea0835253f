"""Why a picture cannot be had."""


class PictureError(ValueError):
    """A picture cannot be fetched or read. The message goes on from the picture's name: it says what is wrong
    with it, and what to change."""
