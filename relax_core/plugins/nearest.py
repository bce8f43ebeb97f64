# SPDX-License-Identifier: Apache-2.0
"""Hints for names that nobody knows: the nearest known ones, as the end of a sentence."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that are close to this one, nearest first."""
    from difflib import get_close_matches

    return get_close_matches(name, list(known), n=3, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` where something is near, else all there is."""
    names = sorted(known)
    if close := nearest(name, names):
        return f"did you mean {' or '.join(repr(n) for n in close)}?"
    return f"known are {', '.join(names)}" if names else "there is none"
