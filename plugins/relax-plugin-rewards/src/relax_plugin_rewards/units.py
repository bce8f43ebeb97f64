# SPDX-License-Identifier: Apache-2.0
"""Names of units after a number: symbols, words, and products such as `m/s^2`."""

from __future__ import annotations

import re

from relax_plugin_rewards.notation import FUNCTIONS, GREEK

_LISTED = (
    "mm cm dm m km in ft yd mi nm um mg g kg lb lbs oz t ms s min h hr hrs ml mL cl l L mph kph kmh Hz kHz MHz GHz N kN J "
    "kJ MJ W kW MW V mV kV A mA K C F Pa kPa MPa atm mol eV keV MeV ohm rad deg cc gal sec ha kWh Wh cal kcal dB bit bits "
    "byte bytes KB MB GB bpm rpm"
)
_SYMBOLS = frozenset(_LISTED.split())
_ALIASES = {
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "inch": "in", "foot": "ft", "yard": "yd",
    "mile": "mi", "milligram": "mg", "gram": "g", "kilogram": "kg", "pound": "lb", "lbs": "lb", "ounce": "oz", "second": "s",
    "sec": "s", "minute": "min", "hour": "h", "hr": "h", "hrs": "h", "milliliter": "ml", "mL": "ml", "liter": "l", "L": "l",
    "feet": "ft", "inches": "in", "degrees": "degree", "deg": "degree", "newton": "N", "joule": "J", "watt": "W", "volt": "V",
    "ampere": "A", "kelvin": "K", "radian": "rad", "cents": "cent", "people": "person", "children": "child", "men": "man",
    "women": "woman", "dollars": "dollar", "euros": "euro", "\u03a9": "ohm", "USD": "dollar", "EUR": "euro",
    "kmh": "km/h", "kph": "km/h", "gallon": "gal",
}  # fmt: skip
_NO_UNITS = re.compile(rf"{FUNCTIONS}|{GREEK}|sqrt|abs|and|or|if|for|where|when|with|but|not|mod|then|than|from|thus")
_TOKEN = re.compile(r"([A-Za-z\u00b5\u03a9]+)(?:\^\{?(-?\d)\}?)?")
_MOST_WORDS = 4


def unit_name(text: str, *, alone: bool) -> str | None:
    r"""Return the unit that a text names, in normal form; None if the text is not a unit.

    `alone`: the text is separated from its number by a space or `\text`, so that words that are not in the list count.
    """
    worded = r"\text" in text
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", " degree ", text)
    text = re.sub(r"\s+", " ", text.replace(r"\cdot", "*")).strip().removesuffix(".")
    text = re.sub(r"\s*([*/^])\s*", r"\1", text)
    text = re.sub(
        r"(?i)\b(square|sq|cubic)\.? ([A-Za-z]+)",
        lambda word: f"{word[2]}^{3 if word[1].lower() == 'cubic' else 2}",
        text,
    )
    text = re.sub(r" per ", "/", text)
    tokens = re.split(r"([*/ ])", text)
    if not text or len(tokens) > 2 * _MOST_WORDS - 1:
        return None
    named: list[str] = []
    known = 0
    for token in tokens:
        if token in ("*", "/", " "):
            named.append(token)
            continue
        found = _TOKEN.fullmatch(token)
        if found is None or _NO_UNITS.fullmatch(found[1].casefold()):
            return None
        name = _canonical(found[1])
        is_known = (
            name in _SYMBOLS or found[1] in _SYMBOLS or found[1].casefold() in _ALIASES or name in _ALIASES.values()
        )
        known += is_known
        if not is_known and not (alone and len(name) >= 3):
            return None
        named.append(f"{name}^{found[2]}" if found[2] else name)
    if len(tokens) == 1 and len(tokens[0]) == 1 and not worded:
        return None  # a letter after a number is a variable
    return "".join(named)


def _canonical(word: str) -> str:
    """Return the symbol of a unit, or the word in lower case and singular."""
    if word in _ALIASES:
        return _ALIASES[word]
    if word in _SYMBOLS:
        return word
    lower = word.casefold().replace("metre", "meter").replace("litre", "liter")
    for form in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if form in _ALIASES:
            return _ALIASES[form]
    return lower[:-1] if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss") else lower
