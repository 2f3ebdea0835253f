"""Splits a long text into pieces that are tokenized separately.

A sample proves at load that this gives the tokens of the whole. If it does not, texts are read whole.
"""

import hashlib
import logging
import re
import sys
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

from tokenizers import Tokenizer

from maxsimd.engine.checkpoint.recipe_store import keep, own_sources, read_kept
from maxsimd.engine.processors.text.breaks import Breaks, find_breaks
from maxsimd.engine.versions import versions_of

log = logging.getLogger(__name__)

# Characters of a piece, or some more: tokenized within some milliseconds and a few megabytes.
PIECE = 16_384
# The most characters that are tokenized in one go where nothing splits them: within a second or so, and about
# 150 bytes of memory for each byte.
LONGEST_PIECE = 1_048_576
# Where a piece may begin is looked for from its end backwards, in steps that grow from this.
_STEP = 256

# Split at every break and compared with the whole, with some of the tokenizer's added tokens behind it.
_SAMPLE = (
    'The quick brown fox, 3.14 of 1,000,000: "it\'s" (so-called) e-mail a@b.c/d?e=f#g; x{y}[z]|~w!\n'
    "don't  two  spaces \n\n lines\nand\ttabs .punctuation ,\n,begins A.B.C.\n"
    "café e\u0301te\u0301 \u00a0\ufb01n\u3000.漢字かな、カナ。中文，标点！ "
    "\U0001f600 \U0001f468\u200d\U0001f469 1\ufe0f\u20e3 a\u200bb \u2581c "
    # Marks at the ends of words, joiners, and what is written in several ways.
    "новый, νέα ΣΑΣ. 한국어 \u1112\u1161\u11ab עִבְרִית العَرَبِيَّةُ فارسی می\u200cخواهم اردو \ufe8d\ufedf "
    "हिन्दी भाषा क् தமிழ் மொழி বাংলা ভাষা తెలుగు ಭಾಷೆ മലയാളം ગુજરાતી ਪੰਜਾਬੀ සිංහල "
    "ภาษา น้ำ ພາສາ ខ្មែរ ဘာသာ མིན། འདི། አማርኛ ቋንቋ ქართული ենա Հայերեն "
    "tiếng Việt tie\u0302\u0301ng Vie\u0323\u0302t "
    # What divides words, behind letters, marks and signs.
    "a\r\nb.\r\nक\u093f\r\nd\r\n\r\ne.\r\n\r\nf\n\ng.\n\nh\t\ti.\tj\u00a0k.\u3000l\u3000\u3000क\u093f\u2003m "
    "1, 2, 3 — — — A. B. C.  D.  e\u0301\u0323  f  ! ? ...\n/g.\n/h\r\r i\u2028j "
)
_ADDED_TOKENS = 64


class LongPieceError(Exception):
    """Raised for text that cannot be split for more than `LONGEST_PIECE` characters."""


def remembered_breaks(tokenizer: Tokenizer, description: str) -> Breaks | None:
    """A tokenizer's breaks, as `proven_breaks` returns them. Finding them takes half a second, so the user's
    cache folder keeps them for the next start, which only proves them again."""
    depends_on = [*versions_of(("tokenizers",)), sys.version, unicodedata.unidata_version, own_sources()]
    name = hashlib.sha256(f"{depends_on} {description}".encode()).hexdigest() + ".breaks"
    kept = read_kept(name)
    if kept is not None:
        try:
            breaks = Breaks(re.compile(kept.decode("utf-8", "surrogatepass")))
        except (ValueError, re.error) as error:
            log.debug("breaks of an earlier start cannot be read: %s", error)
        else:
            if _are_proven(breaks, tokenizer):
                return breaks
    found = proven_breaks(tokenizer)
    if found is not None:
        keep(name, found.pattern.pattern.encode("utf-8", "surrogatepass"))
    return found


def proven_breaks(tokenizer: Tokenizer) -> Breaks | None:
    """Returns a tokenizer's breaks; None if texts are read whole."""
    breaks = find_breaks(tokenizer)
    if breaks is None:
        log.info(
            "nothing is known of where this tokenizer's texts can be cut: they are read whole, and those of "
            "more than %d characters are refused",
            LONGEST_PIECE,
        )
        return None
    if _are_proven(breaks, tokenizer):
        return breaks
    log.warning(
        "this tokenizer cannot split texts safely: it reads them whole, and refuses those of more "
        "than %d characters",
        LONGEST_PIECE,
    )
    return None


def _are_proven(breaks: Breaks, tokenizer: Tokenizer) -> bool:
    """Whether the pieces of a sample, split at every break, have the tokens of the whole."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:_ADDED_TOKENS]
    sample = _SAMPLE + " ".join(f"a{token}b {token} c, {token}.d" for token in added)
    ends = [*breaks.all(sample), len(sample)]
    texts = [sample, *(sample[start:stop] for start, stop in pairwise([0, *ends]))]
    # Not as a batch, which would start the library's threads with the priority of this one.
    whole, *pieces = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return bool(whole == [token for piece in pieces for token in piece])


def piece_bounds(text: str, size: int, breaks: Breaks | None) -> Iterator[tuple[int, int]]:
    """Yields where pieces of about `size` characters begin and end, first to last."""
    start = 0
    while len(text) - start > size:
        most = start + LONGEST_PIECE
        stop = None if breaks is None else breaks.first(text, start + size, min(most + 1, len(text)))
        if stop is None:
            break
        yield start, stop
        start = stop
    _check(len(text) - start)
    yield start, len(text)


def piece_bounds_backwards(text: str, size: int, breaks: Breaks | None) -> Iterator[tuple[int, int]]:
    """Yields where pieces of about `size` characters begin and end, last to first."""
    stop = len(text)
    while stop > size:
        start = None if breaks is None else _last_start(text, stop, size, breaks)
        if start is None:
            break
        yield start, stop
        stop = start
    _check(stop)
    yield 0, stop


def _last_start(text: str, stop: int, size: int, breaks: Breaks) -> int | None:
    upper, step = stop - size, _STEP
    lowest = max(0, stop - LONGEST_PIECE)
    while upper > lowest:
        lower = max(lowest, upper - step)
        start = breaks.first(text, lower, upper)
        if start is not None:
            return start
        upper, step = lower, 2 * step
    return None


def _check(length: int) -> None:
    if length > LONGEST_PIECE:
        raise LongPieceError
