# SPDX-License-Identifier: Apache-2.0
"""Detection of a text's language by its script, which tells Hindi from English, but not Spanish from English."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

LATIN = (
    "af", "ca", "cs", "cy", "da", "de", "en", "es", "et", "eu", "fi", "fr", "ga", "gl", "hr", "hu", "id", "is", "it", "lt",
    "lv", "ms", "mt", "nl", "no", "pl", "pt", "ro", "sk", "sl", "sq", "sv", "sw", "tl", "tr", "vi",
)  # fmt: skip
SCRIPTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["ar", "fa", "ur", "ps", "ckb"], ("ARABIC",)),
    **dict.fromkeys(["be", "bg", "kk", "mk", "mn", "ru", "sr", "tg", "uk"], ("CYRILLIC",)),
    **dict.fromkeys(["hi", "mr", "ne", "sa"], ("DEVANAGARI",)),
    "am": ("ETHIOPIC",), "bn": ("BENGALI",), "el": ("GREEK",), "gu": ("GUJARATI",), "he": ("HEBREW",), "hy": ("ARMENIAN",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"), "ka": ("GEORGIAN",), "km": ("KHMER",), "kn": ("KANNADA",), "ko": ("HANGUL",),
    "lo": ("LAO",), "ml": ("MALAYALAM",), "my": ("MYANMAR",), "or": ("ORIYA",), "pa": ("GURMUKHI",), "si": ("SINHALA",),
    "ta": ("TAMIL",), "te": ("TELUGU",), "th": ("THAI",), "zh": ("CJK",), "zh-cn": ("CJK",), "zh-tw": ("CJK",),
    **dict.fromkeys(LATIN, ("LATIN",)),
}  # fmt: skip
"""Scripts of each language, by its code. Languages that share a script can't be distinguished."""
MOSTLY = 0.75
"""Minimum share of letters in the language's script; the rest may be foreign names and terms."""


def is_written_in(text: str, language: str) -> bool:
    """Return True if most letters are in the language's script. Japanese must contain kana, Chinese must not."""
    wanted = SCRIPTS[language]
    scripts = [script(sign) for sign in text if unicodedata.category(sign)[0] in "LM"]  # vowel signs are marks
    kana = any(one in ("HIRAGANA", "KATAKANA") for one in scripts)
    if "CJK" in wanted and kana != (language == "ja"):
        return False
    return bool(scripts) and sum(one in wanted for one in scripts) >= MOSTLY * len(scripts)


@lru_cache(maxsize=65536)
def script(letter: str) -> str:
    """Return the script of a letter: the first word of its Unicode name."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]
