# SPDX-License-Identifier: Apache-2.0
"""Placeholder tokens of media: a template writes one per medium, and a model reads as many as the medium takes.

A prompt must have exactly one placeholder per medium, of the medium's kind and in order. A prompt whose text looks like
a placeholder is therefore refused. For model types not named here, videos expand to placeholders without further marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


_TIMED_MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types that read a video as frames, with each frame's time as text before the frame."""
_SOUND_MODELS = ("qwen3_omni_moe_thinker",)
"""Model types that read a video with sound between audio marks."""
_VISION = {"vision": ("visual.patch_embed", "visual.pos_embed", "visual.blocks")}
_LANGUAGE = {"language": ("language_model", "lm_head")}
_AUDIO = {"audio": ("audio_tower.conv*", "audio_tower.layers", "audio_tower.ln_post")}
_MERGER = "visual.merger"
_PARTS: tuple[tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]], ...] = (
    (("qwen3_vl", "qwen3_vl_moe"), {**_VISION, "projector": (_MERGER, "visual.deepstack_merger_list"), **_LANGUAGE}),
    (("qwen3_5", "qwen3_5_moe"), {**_VISION, "projector": (_MERGER,), **_LANGUAGE}),
    (("qwen3_omni_moe", "qwen3_omni_moe_thinker"), {
        **_VISION, **_AUDIO, **_LANGUAGE,
        "projector": (_MERGER, "visual.merger_list", "audio_tower.proj1", "audio_tower.proj2"),
    }),
)  # fmt: skip
PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {name: parts for names, parts in _PARTS for name in names}
"""Patterns of module names by `model_type` and part. A projector connects a tower to the language model."""


class TimedVideo:
    """Expansion of a video to times as text, such as `<0.3 seconds>`, each followed by frames between vision marks."""

    def __init__(self, video: int, marks: tuple[int, int], encode: Callable[[str], tuple[int, ...]]) -> None:
        self._video, self._marks, self._encode = video, marks, encode

    def expand(
        self, tokens: Sequence[int], layouts: Sequence[Sequence[PlaceholderSpan]], holds: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Expand each placeholder to the tokens of its medium. Raises ValueError for a video without frame times."""
        ids, left, out = frozenset(holds.values()), iter(layouts), list[int]()
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token not in ids:
                out.append(token)
            elif token != self._video:
                out += [holds[span.kind] for span in next(left) for _ in range(span.size)]
            else:
                # Drop the marks that the template put around the placeholder: each time's frames get their own.
                if (*out[-1:], *tokens[at + 1 : at + 2]) == self._marks:
                    del out[-1]
                    at += 1
                out += self._shown(next(left))
            at += 1
        return tuple(out)

    def _shown(self, layout: Sequence[PlaceholderSpan]) -> Iterator[int]:
        start, end = self._marks
        for span in layout:
            if span.seconds is None:
                raise ValueError("a video without frame times; this model reads the time of each frame")
            yield from self._encode(f"<{span.seconds:.1f} seconds>")
            yield from (start, *[self._video] * span.size, end)


class VideoWithSound:
    """Expansion of a video with sound to placeholders between audio marks."""

    def __init__(self, marks: tuple[int, int]) -> None:
        self._marks = marks

    def expand(
        self, tokens: Sequence[int], layouts: Sequence[Sequence[PlaceholderSpan]], holds: Mapping[str, int]
    ) -> tuple[int, ...]:
        ids, left, out = frozenset(holds.values()), iter(layouts), list[int]()
        start, end = self._marks
        for token in tokens:
            if token not in ids:
                out.append(token)
                continue
            layout = next(left)
            own = [holds[span.kind] for span in layout for _ in range(span.size)]
            out += [start, *own, end] if len({span.kind for span in layout}) > 1 else own
        return tuple(out)


def reader(
    config: Mapping[str, Any], holds: Mapping[str, int], encode: Callable[[str], tuple[int, ...]]
) -> TimedVideo | VideoWithSound | None:
    """Return the expansion that the model's videos need; None if media expand to placeholders only."""
    kind = config.get("model_type")
    mark = "vision" if kind in _TIMED_MODELS else "audio" if kind in _SOUND_MODELS else ""
    start, end = (config.get(f"{mark}_{side}_token_id") for side in ("start", "end"))
    if not mark or "video" not in holds or start is None or end is None:
        return None
    marks = int(start), int(end)
    return TimedVideo(holds["video"], marks, encode) if mark == "vision" else VideoWithSound(marks)
