# SPDX-License-Identifier: Apache-2.0
"""Tokens that hold the place of media: one a medium as a template writes them, as many as it takes for a model.

A rendered prompt names its media in order. Each must have its one token, no more and no other, so that text which looks like
a placeholder never reaches a model. A model type that is not named here has nothing but placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.api.family import ModelFamily, Rendered
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.task import Media, Message


class MediaRefused(Exception):
    """A medium can't be read, or a prompt and its media don't fit together: an outcome of the samples that need it."""


class MediaUnavailable(MediaRefused):
    """A medium can't be read at present, for reasons that its content does not prove: it may be there when asked for again."""


class PromptTooLong(MediaRefused):
    """A prompt has with its media more tokens than it may."""


@dataclass(frozen=True, slots=True)
class PlaceholderTokens:
    """A medium in the store, and the pieces of its placeholders."""

    kind: str
    key: str
    layout: tuple[PlaceholderSpan, ...]


def media_of(messages: Iterable[Message]) -> list[Media]:
    """List all media that messages show, in order."""
    parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
    return [part.media for part in parts if part.media is not None]


def expand_placeholders(rendered: Rendered, media: Sequence[PlaceholderTokens], family: ModelFamily[Any]) -> Rendered:
    """Expand a rendering to the tokens that each medium takes, and put keys for names. Raises MediaRefused."""
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
    """Say why these tokens, as a template wrote them, don't hold place for such media in this order; empty: they do."""
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


_TIMED_MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Models that read a video as pictures with the time before each."""
_SOUND_MODELS = ("qwen3_omni_moe_thinker",)
"""A video that comes with its sound stands between marks of sound too."""
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
"""By `model_type`, name of a part -> patterns of modules. A projector is what leads from a tower to the language model."""


class TimedVideo:
    """Videos as `<0.3 seconds>` and the frames of that time between marks, again and again."""

    def __init__(self, video: int, marks: tuple[int, int], encode: Callable[[str], tuple[int, ...]]) -> None:
        self._video, self._marks, self._encode = video, marks, encode

    def expand(
        self, tokens: Sequence[int], layouts: Sequence[Sequence[PlaceholderSpan]], holds: Mapping[str, int]
    ) -> tuple[int, ...]:
        """ValueError for a video that tells no times."""
        ids, left, out = frozenset(holds.values()), iter(layouts), list[int]()
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token not in ids:
                out.append(token)
            elif token != self._video:
                out += [holds[span.kind] for span in next(left) for _ in range(span.size)]
            else:
                # A template's marks around the one placeholder give way to those around each time.
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
                raise ValueError("a video without the times of its frames, which this model reads")
            yield from self._encode(f"<{span.seconds:.1f} seconds>")
            yield from (start, *[self._video] * span.size, end)


class VideoWithSound:
    """Videos that come with their sound between marks of sound."""

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
    """The reader of the model's media; None: placeholders are all there is."""
    kind = config.get("model_type")
    mark = "vision" if kind in _TIMED_MODELS else "audio" if kind in _SOUND_MODELS else ""
    start, end = (config.get(f"{mark}_{side}_token_id") for side in ("start", "end"))
    if not mark or "video" not in holds or start is None or end is None:
        return None
    marks = int(start), int(end)
    return TimedVideo(holds["video"], marks, encode) if mark == "vision" else VideoWithSound(marks)
