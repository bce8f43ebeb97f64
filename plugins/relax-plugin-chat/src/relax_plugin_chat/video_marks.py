# SPDX-License-Identifier: Apache-2.0
"""Videos of models that read them with marks, times or sound, and the freezable parts of models with media.

For model types not named here, videos expand to placeholders without further marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_core.api.modality import PlaceholderSpan

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
