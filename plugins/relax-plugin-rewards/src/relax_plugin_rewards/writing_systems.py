# SPDX-License-Identifier: Apache-2.0
"""Languages by the scripts that they are written in. It tells Hindi from English, and not Spanish from English."""

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
"""Scripts of languages by their codes. Languages that share a script are not told apart."""
MOSTLY = 0.75
"""Share of letters in a language's script; names and terms of others may be the rest."""


def is_written_in(text: str, language: str) -> bool:
    """Tell whether the letters are mostly of the language's script; Japanese needs some kana, Chinese has none."""
    wanted = SCRIPTS[language]
    scripts = [script(sign) for sign in text if unicodedata.category(sign)[0] in "LM"]  # vowel signs are marks
    kana = any(one in ("HIRAGANA", "KATAKANA") for one in scripts)
    if "CJK" in wanted and kana != (language == "ja"):
        return False
    return bool(scripts) and sum(one in wanted for one in scripts) >= MOSTLY * len(scripts)


@lru_cache(maxsize=65536)
def script(letter: str) -> str:
    """Return the first word of a letter's name in Unicode, which is its script's."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]
