# SPDX-License-Identifier: Apache-2.0
"""Placeholder tokens of media: a template writes one per medium, and a model reads as many as the medium takes.

A prompt must have exactly one placeholder per medium, of the medium's kind and in order. A prompt whose text looks like
a placeholder is therefore refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.task import Media, Message


class MediaRefused(Exception):
    """A medium that can't be read, or that does not match its prompt. Samples that need it end with a media error."""


class MediaUnavailable(MediaRefused):
    """A medium that can't be read now, although its content may be fine; a later attempt may succeed."""


class PromptTooLong(MediaRefused):
    """A prompt that exceeds its token limit once its media are expanded."""


@dataclass(frozen=True, slots=True)
class PlaceholderTokens:
    """A medium in the store, with the layout of its placeholders."""

    kind: str
    key: str
    layout: tuple[PlaceholderSpan, ...]


def media_of(messages: Iterable[Message]) -> list[Media]:
    """Return all media of the messages, in order."""
    parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
    return [part.media for part in parts if part.media is not None]


def expand_placeholders(rendered: Rendered, media: Sequence[PlaceholderTokens], family: ModelFamily[Any]) -> Rendered:
    """Expand each placeholder to the tokens of its medium, and name media by store keys. Raises MediaRefused."""
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
    """Return why a prompt's placeholders do not match media of these kinds in this order; empty if they match."""
    unknown = [kind for kind in kinds if kind not in ids]
    if unknown:
        return f"a medium of kind {unknown[0]}; the model's config.json names no {unknown[0]}_token_id"
    kind_of = {number: kind for kind, number in ids.items()}
    found = [kind_of[token] for token in tokens if token in kind_of]
    if found == list(kinds):
        return ""
    fix = "the template must write one placeholder per medium, and texts must not contain any"
    return f"placeholders of {_listed(found)} for media of {_listed(kinds)}; {fix}"


def _listed(kinds: Sequence[str]) -> str:
    shown = ", ".join(kinds[:6]) or "nothing"
    return shown if len(kinds) <= 6 else f"{shown}, ... ({len(kinds)} in all)"
