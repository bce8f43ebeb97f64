# SPDX-License-Identifier: Apache-2.0
"""Tokens that hold the place of media: one a medium as a template writes them, as many as it takes for a model.

A rendered prompt names its media in order. Here is checked that each has its one token, no more and no other, so that
text which looks like a placeholder never reaches a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import Span


class MediaRefused(Exception):
    """A medium can't be read, or a prompt and its media don't fit together: an outcome of the samples that need it."""


class PromptTooLong(MediaRefused):
    """With its media a prompt has more tokens than it may."""


@dataclass(frozen=True, slots=True)
class Held:
    """A medium in the store."""

    kind: str
    key: str
    layout: tuple[Span, ...]


def held(rendered: Rendered, media: Sequence[Held], family: ModelFamily[Any]) -> Rendered:
    """With the tokens that each medium takes, and keys for names. Raises MediaRefused."""
    fault = misplaced(rendered.tokens, [medium.kind for medium in media], family.placeholders)
    if fault:
        raise MediaRefused(fault)
    if not media:
        return rendered
    try:
        tokens = family.expand(rendered.tokens, [medium.layout for medium in media])
    except ValueError as error:
        raise MediaRefused(str(error)) from error
    return Rendered(tokens, tuple(medium.key for medium in media))


def misplaced(tokens: Sequence[int], kinds: Sequence[str], ids: Mapping[str, int]) -> str:
    """Why these tokens, as a template wrote them, don't hold place for such media in this order; empty: they do."""
    unknown = [kind for kind in kinds if kind not in ids]
    if unknown:
        return f"a medium of kind {unknown[0]}; the model's config.json names no {unknown[0]}_token_id"
    kind_of = {number: kind for kind, number in ids.items()}
    found = [kind_of[token] for token in tokens if token in kind_of]
    if found == list(kinds):
        return ""
    fix = "a template writes one for each medium, and texts must not hold any"
    return f"placeholders of {_listed(found)} for media of {_listed(kinds)}; {fix}"


def _listed(kinds: Sequence[str]) -> str:
    shown = ", ".join(kinds[:6]) or "nothing"
    return shown if len(kinds) <= 6 else f"{shown}, ... ({len(kinds)} in all)"
