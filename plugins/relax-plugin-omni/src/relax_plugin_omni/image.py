# SPDX-License-Identifier: Apache-2.0
"""Images as patches. The number of tokens follows from the header; images that are too large are not decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field, model_validator

from relax_core.api import Media, ModalityProcessor, Options, PlaceholderSpan, ProcessedMedia
from relax_core.media.source import content_key, read_source
from relax_plugin_omni.geometry import Vision
from relax_plugin_omni.patches import fitted, patches, resized

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
TURNED = (5, 6, 7, 8)
"""Values of the EXIF tag Orientation that swap width and height."""
ORIENTATION = 0x0112
SHOWN = 512
"""Number of pixels on the longer side of a reduced preview."""


class ImageOptions(Options):
    """Options of `[[media]] name = "image"`."""

    min_tokens: int = Field(default=4, ge=1)
    """Minimum number of tokens of an image; smaller images are enlarged."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum number of tokens of an image; larger images are shrunk."""
    max_megapixels: float = Field(default=64.0, gt=0)
    """Maximum size of an image file in megapixels; larger files are refused before any pixel is decoded."""

    @model_validator(mode="after")
    def _ordered(self) -> ImageOptions:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower min_tokens")
        return self


class ImageProcessor(ModalityProcessor[ImageOptions]):
    """A processor that turns an image into patches."""

    medium: ClassVar[str] = "image"

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        """Return the image's number of tokens, computed from its header alone."""
        vision = Vision.of(model)
        with opened(read_source(media.source)) as picture:
            high, wide = self._size(picture, vision)
        return high * wide // vision.side**2

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        """Return `pixel_values` [patches, values] and `image_grid_thw` [1, 3]."""
        vision = Vision.of(model)
        with opened(data) as picture:
            high, wide = self._size(picture, vision)
            pixels = resized(ImageOps.exif_transpose(picture), high, wide)
        values, grid = patches(pixels[None], vision)
        tensors = {"pixel_values": values, "image_grid_thw": np.array([grid], np.int64)}
        tokens = int(np.prod(grid)) // vision.merge**2
        key = content_key(data, "image", self.options, vision)
        return ProcessedMedia(key, tensors, tokens, (PlaceholderSpan("image", tokens),))

    def facts(self, media: Media, data: bytes) -> Mapping[str, Any]:
        """Return `width` and `height` in pixels and the file's `format`."""
        with opened(data) as picture:
            return {"width": picture.size[0], "height": picture.size[1], "format": picture.format}

    def preview(self, media: Media, data: bytes, most_bytes: int) -> bytes | None:
        """Return the image itself if it fits in `most_bytes`, else a smaller JPEG copy, else None."""
        own = super().preview(media, data, most_bytes)
        if own is not None:
            return own
        with opened(data) as picture:
            if picture.size[0] * picture.size[1] > self.options.max_megapixels * 1e6:
                return None
            small = ImageOps.exif_transpose(picture).convert("RGB")
            small.thumbnail((SHOWN, SHOWN))
        out = io.BytesIO()
        small.save(out, "JPEG", quality=80)
        return out.getvalue() if out.tell() <= most_bytes else None

    def _size(self, picture: Image.Image, vision: Vision) -> tuple[int, int]:
        """Return height and width in pixels that the image has after resizing for the model."""
        wide, high = picture.size
        if wide * high > self.options.max_megapixels * 1e6:
            raise ValueError(f"an image of {wide} x {high} pixels; at most {self.options.max_megapixels} megapixels")
        if picture.getexif().get(ORIENTATION) in TURNED:
            wide, high = high, wide
        token = vision.side**2
        return fitted(high, wide, vision.side, self.options.min_tokens * token, self.options.max_tokens * token)


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open an image. Raises ValueError instead of every exception of a decoder."""
    if not data:
        raise ValueError("an image of no bytes")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            yield picture
    except ValueError:
        raise
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"an image in none of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise many types, SyntaxError and struct.error among them
        raise ValueError(f"an image that can't be decoded ({type(error).__name__}: {error})") from error
