# SPDX-License-Identifier: Apache-2.0
"""The environment `zoom`: the policy may look at a part of an image again, at a higher resolution.

The image processor shrinks a large image to few tokens. A call of the tool `zoom` names a box of the original, and
returns the crop as a new image. The first turn without a call is the answer, which the run's rewards judge. The
environment reads the images itself, from paths, data URIs and cells of task files; images by URL are refused.
"""

from __future__ import annotations

import base64
import io
from typing import Any, ClassVar, Literal

from PIL import Image, ImageOps
from pydantic import Field, field_validator

from relax_core.api import Action, Environment, Media, Message, Observation, Options, Part, Step, Task, Tool, ToolCall
from relax_core.media.source import read_source
from relax_plugin_omni.image import opened

THOUSAND = 1000


class ZoomOptions(Options):
    """Options of `zoom`."""

    units: Literal["thousandths", "pixels"] = "thousandths"
    """Units of a box's coordinates: thousandths of width and height, or pixels of the file."""
    min_pixels: int = Field(28, ge=1)
    """Minimum side of a crop, in pixels of the file; a smaller box is refused with a message to the policy."""
    max_zooms: int = Field(8, ge=0)
    """Maximum number of crops of a sample, which are kept in memory until the sample ends; further calls are refused
    with a message to the policy. 0: no limit."""
    max_megapixels: float = Field(64.0, gt=0)
    """Maximum size of an image file in megapixels; a larger file fails the sample before any pixel is decoded."""
    caption: str = "Image {number}:"
    """Text before a crop; `{number}` is the number that later calls use for the crop. Empty: no text."""

    @field_validator("caption")
    @classmethod
    def _known_places(cls, caption: str) -> str:
        try:
            caption.format(number=0)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"caption: got {caption!r}; the only placeholder is {{number}}") from error
        return caption


class ZoomRefused(Exception):
    """Error for a call that is refused; its message is the answer to the policy."""


class Zoom(Environment[ZoomOptions]):
    """One sample: crops, then an answer.

    reset (the task's images are numbered from 0) -> (turn with calls -> crops, numbered on) ... -> turn without calls
    """

    tools: ClassVar[tuple[Tool, ...]] = (
        Tool(
            "zoom",
            {
                "type": "object",
                "properties": {
                    "box": {
                        "type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4,
                        "description": "left, top, right, bottom",
                    },
                    "image": {"type": "integer", "description": "number of the image; the first is 0, the default"},
                },
                "required": ["box"],
            },
            "Look at a part of an image in more detail.",
        ),
    )  # fmt: skip

    async def reset(self, task: Task, seed: int) -> Observation | None:
        messages = () if isinstance(task.prompt, str) else task.prompt
        parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
        self._images = [self._read(part.media) for part in parts if part.media and part.media.kind == "image"]
        if not self._images:
            raise ValueError(f"task {task.id} has no image in its prompt to zoom into; add an image")
        self._zooms = 0
        return None

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step("", done=True, info={"zooms": self._zooms})
        answers = tuple(Message("tool", self._answer(call), name=call.name) for call in action.tool_calls)
        return Step(Observation(messages=answers), done=False, info={"zooms": self._zooms})

    def _read(self, media: Media) -> Image.Image:
        with opened(read_source(media.source)) as picture:
            if picture.size[0] * picture.size[1] > self.options.max_megapixels * 1e6:
                raise ValueError(
                    f"an image of {picture.size[0]} x {picture.size[1]} pixels; environment.max_megapixels allows "
                    f"{self.options.max_megapixels}"
                )
            return ImageOps.exif_transpose(picture).convert("RGB")

    def _answer(self, call: ToolCall) -> str | tuple[Part, ...]:
        try:
            crop = self._crop(call.arguments)
        except ZoomRefused as refused:
            return str(refused)
        self._zooms += 1
        self._images.append(crop)
        caption = self.options.caption.format(number=len(self._images) - 1)
        shown = Part(media=Media("image", _data_uri(crop)))
        return (Part(caption), shown) if caption else (shown,)

    def _crop(self, arguments: Any) -> Image.Image:
        """Return the crop of the box, clipped to the image. Raises ZoomRefused for an invalid call."""
        box, number = arguments.get("box"), arguments.get("image", 0)
        if set(arguments) - {"box", "image"} or not _is_box(box):
            raise ZoomRefused('zoom takes {"box": [left, top, right, bottom], "image": number}.')
        if type(number) is not int or not 0 <= number < len(self._images):
            raise ZoomRefused(f"There is no image {number!r}; there are 0 to {len(self._images) - 1}.")
        if self.options.max_zooms and self._zooms >= self.options.max_zooms:
            raise ZoomRefused("No zooms are left; answer with what was seen.")
        image = self._images[number]
        units = (THOUSAND, THOUSAND) if self.options.units == "thousandths" else image.size
        left, top, right, bottom = (
            round(min(max(value / units[at % 2], 0.0), 1.0) * image.size[at % 2]) for at, value in enumerate(box)
        )
        least = min(self.options.min_pixels, *image.size)
        if right - left < least or bottom - top < least:
            raise ZoomRefused(
                f"The box {list(box)} has {right - left} x {bottom - top} pixels; each side needs {least}."
            )
        return image.crop((left, top, right, bottom))


def _is_box(value: Any) -> bool:
    """Return True if a value is a list of four finite numbers below 1e9 in size."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(type(one) in (int, float) and abs(one) < 1e9 for one in value)  # the comparison is False for NaN
    )


def _data_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
