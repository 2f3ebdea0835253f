"""Encodings of token vectors as requests ask for them, and as answers describe them."""

import msgspec

from maxsimd.api.wire import EmbeddingsRequest, Encoding
from maxsimd.engine import InvalidRequestError, Muvera


def encoding_of(request: EmbeddingsRequest) -> Muvera | None:
    """The encoding that a request asks for, None for none. Raises InvalidRequestError for parameters without
    it, and for those that make no sense."""
    if request.encoding is None:
        if request.muvera is not None:
            raise InvalidRequestError(
                'muvera is for "encoding": "muvera"; ask for that, or leave it out', "muvera"
            )
        return None
    given = {} if request.muvera is None else msgspec.structs.asdict(request.muvera)
    parameters = {name: value for name, value in given.items() if value is not None}
    if parameters.get("d_proj") == 0:
        parameters["d_proj"] = None
    try:
        return Muvera(**parameters)
    except ValueError as error:
        raise InvalidRequestError(str(error), "muvera") from None


def described(muvera: Muvera) -> Encoding:
    """An encoding with all its parameters, as a request may send them again."""
    return Encoding(
        "muvera",
        muvera.k_sim,
        muvera.r_reps,
        muvera.d_proj or 0,
        muvera.d_final,
        muvera.full_length,
        muvera.seed,
    )
