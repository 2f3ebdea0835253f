"""Texts of many scripts cut at their breaks, to be compared with the whole."""

import functools
import unicodedata
from collections.abc import Collection, Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from maxsimd.engine.processors.text.breaks import Breaks, find_breaks
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from tests.checkpoints.tokenizer_kinds import CUT, Kind

# Words as they are written. Most end in a vowel sign or another mark in the scripts that have them.
SCRIPTS = {
    "Amharic": "አማርኛ ቋንቋ ሰላም", "Arabic": "اللغة العربية جميلة العَرَبِيَّةُ",
    "Arabic presentation forms": "\ufe8d\ufedf\ufecc\ufeae\ufe91\ufef4\ufe94 \ufefb \ufe8e",
    "Armenian": "Հայերեն լեզու բարև", "Bengali": "ভাষা বাংলা নদী পাখি", "Burmese": "ဘာသာ စကား မြန်မာ ရေ",
    "Chinese": "漢字 中文 标点", "Cyrillic supplement": "ԁԃ ӡӣ ҝҟҡ \u0501\u050f",
    "Georgian": "ქართული ენა გამარჯობა", "Greek": "λόγος ΛΌΓΟΣ ἀρχή ᾧ", "Gujarati": "ગુજરાતી ભાષા નદી",
    "Hebrew": "עִבְרִית שָׁלוֹם לְ", "Hindi": "हिन्दी भाषा नदी पानी",
    "Hindi in halves": "\u0915\u094d \u0924\u094d \u0938\u0902\u0938\u094d", "Japanese": "かな カナ が",
    "Kannada": "ಕನ್ನಡ ಭಾಷೆ ನದಿ", "Khmer": "ភាសា ខ្មែរ ទឹក", "Korean": "한국어 문장",
    "Korean in jamo": "\u1112\u1161\u11ab \u1100\u116e\u11a8 \u110b\u1165", "Lao": "ພາສາ ລາວ ນ້ຳ ນີ້",
    "Malayalam": "മലയാളം ഭാഷ നദി", "Pashto": "پښتو ژبه دي ښځې",
    "Persian": "فارسی زبان می\u200cخواهم کتاب\u200cها", "Punjabi": "ਪੰਜਾਬੀ ਭਾਸ਼ਾ ਨਦੀ",
    "Russian": "Быстрая лиса бежит", "Sinhala": "සිංහල භාෂාව නදී ශ්\u200dරී", "Tamil": "தமிழ் மொழி நதி ஆறு",
    "Telugu": "తెలుగు భాష నది", "Thai": "ภาษา ไทย น้ำ ที่ เ", "Tibetan": "བོད་སྐད། ཡིན། དེ་རིང་།",
    "Tamazight": "ⵜⴰⵎⴰⵣⵉⵖⵜ ⵜⵓⵜⵍⴰⵢⵜ", "N'Ko": "ߒߞߏ ߞߊ߲ ߘߐ߫", "Urdu": "اردو زبان ہے ڑے",
    "Vietnamese": "tiếng Việt được ngữ",
}  # fmt: skip
SCRIPTS |= {
    f"{name}, decomposed": unicodedata.normalize("NFD", SCRIPTS[name])
    for name in ("Greek", "Japanese", "Korean", "Russian", "Tamil", "Vietnamese")
}
# Characters that divide words.
DIVIDERS = (
    *("\r\n", "\n\n", "  ", " " * 9, "\t", "\t\t", "\u00a0", "\u3000"),
    *(". ", ".\n", ".\r\n", ".  ", "\u0964 ", " \u2014 ", ", "),
)


def usual_first(names: Iterable[str], usual: Collection[str]) -> list[Any]:
    """Names for tests, of which `make test` takes the usual ones alone."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


# A kind of each pre-tokenizer and model. The others are variations of these.
KINDS = usual_first(CUT, ("bert", "qwen", "roberta", "xlm_roberta", "gemma"))


@functools.cache
def with_breaks(kind: Kind) -> tuple[Tokenizer, Breaks]:
    tokenizer = kind()
    breaks = find_breaks(tokenizer)
    assert breaks is not None
    return tokenizer, breaks


def cut_kind(name: str) -> tuple[Tokenizer, Breaks]:
    return with_breaks(CUT[name])


def assert_pieces_are_the_whole(tokenizer: Tokenizer, breaks: Breaks, text: str, words: bool = True) -> None:
    """Compares the tokens of a text with those of its smallest pieces; if `words`, also where words begin."""
    texts = [text, *(text[a:b] for a, b in pairwise([0, *breaks.all(text), len(text)]))]
    whole, *pieces = [
        [
            (token, words and before != word)
            for token, (before, word) in zip(encoding.ids, pairwise([None, *encoding.word_ids]), strict=True)
        ]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    assert [token for piece in pieces for token in piece] == whole


@functools.cache
def text_tokenizer(kind: Kind) -> TextTokenizer:
    return TextTokenizer(SimpleNamespace(backend_tokenizer=kind()))


def tokenized(monkeypatch: pytest.MonkeyPatch, tokenizer: TextTokenizer) -> list[list[str]]:
    batches: list[list[str]] = []
    encode = tokenizer._encode_batch
    recorded = lambda texts, *given, **named: batches.append([*texts]) or encode(texts, *given, **named)  # noqa: E731
    monkeypatch.setattr(tokenizer, "_encode_batch", recorded)
    return batches


def num_characters(batches: list[list[str]]) -> int:
    return sum(len(text) for batch in batches for text in batch)
