# SPDX-License-Identifier: Apache-2.0
"""What the models that transformers loads put in the place of media beside placeholders, and how they call their parts.

By `model_type` of `config.json`; a model that is not here has nothing but placeholders, and its parts are named by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_core.api.modality import Span

_TIMED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""They read a video as pictures with the time before each."""
_HEARD = ("qwen3_omni_moe_thinker",)
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
"""Of a model type: name of a part -> patterns of modules. A projector is what leads from a tower to the language model."""


class Timed:
    """Videos as `<0.3 seconds>` and the frames of that time between marks, again and again."""

    def __init__(self, video: int, marks: tuple[int, int], encode: Callable[[str], tuple[int, ...]]) -> None:
        self._video, self._marks, self._encode = video, marks, encode

    def expand(
        self, tokens: Sequence[int], layouts: Sequence[Sequence[Span]], holds: Mapping[str, int]
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

    def _shown(self, layout: Sequence[Span]) -> Iterator[int]:
        start, end = self._marks
        for span in layout:
            if span.seconds is None:
                raise ValueError("a video without the times of its frames, which this model reads")
            yield from self._encode(f"<{span.seconds:.1f} seconds>")
            yield from (start, *[self._video] * span.size, end)


class Heard:
    """Videos that come with their sound between marks of sound."""

    def __init__(self, marks: tuple[int, int]) -> None:
        self._marks = marks

    def expand(
        self, tokens: Sequence[int], layouts: Sequence[Sequence[Span]], holds: Mapping[str, int]
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
) -> Timed | Heard | None:
    """How the model reads media; None: placeholders are all there is."""
    kind = config.get("model_type")
    mark = "vision" if kind in _TIMED else "audio" if kind in _HEARD else ""
    start, end = (config.get(f"{mark}_{side}_token_id") for side in ("start", "end"))
    if not mark or "video" not in holds or start is None or end is None:
        return None
    marks = int(start), int(end)
    return Timed(holds["video"], marks, encode) if mark == "vision" else Heard(marks)
