# SPDX-License-Identifier: Apache-2.0
"""Crops have the file's own pixels, calls that show nothing are told why, and the environment keeps what all promise."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from relax_plugin_omni.zoom import Zoom, ZoomOptions, _data_uri

from relax_core.api import Action, Media, Message, Observation, Part, Step, Task, ToolCall
from relax_core.media.source import read_source
from relax_core.testing.environment import EnvironmentSuite

HIGH, WIDE = 40, 100
PIXELS = np.random.default_rng(0).integers(0, 256, (HIGH, WIDE, 3), np.uint8)
PICTURE = Media("image", _data_uri(Image.fromarray(PIXELS)))


def task(*shown: Media) -> Task:
    return Task("t", (Message("user", (*(Part(media=one) for one in shown), Part("which?"))),), "red")


class TestZoom(EnvironmentSuite):
    component = "zoom"
    tasks = (task(PICTURE), task(PICTURE, PICTURE))


def play(*turns: Sequence[dict[str, Any]], at: Task = task(PICTURE), **options: Any) -> list[Step]:
    """Play turns, each a list of the arguments of its calls."""

    async def played() -> list[Step]:
        environment = Zoom(ZoomOptions(**{"min_pixels": 1, **options}))
        assert await environment.reset(at, 0) is None
        calls = [tuple(ToolCall("zoom", arguments) for arguments in turn) for turn in turns]
        return [await environment.step(Action("red", (), one)) for one in calls]

    return asyncio.run(played())


def shown(step: Step) -> list[tuple[str, np.ndarray] | str]:
    """Of each message: its caption and pixels, or its words."""
    assert isinstance(step.observation, Observation) and not step.done and step.reward is None
    seen: list[tuple[str, np.ndarray] | str] = []
    for message in step.observation.messages:
        assert (message.role, message.name) == ("tool", "zoom")
        if isinstance(message.content, str):
            seen.append(message.content)
        else:
            *said, last = message.content
            assert last.media is not None
            picture = Image.open(io.BytesIO(read_source(last.media.source)))
            seen.append(("".join(part.text for part in said), np.asarray(picture)))
    return seen


def test_a_crop_has_the_pixels_of_its_box_and_an_answer_ends_the_sample() -> None:
    found, answered = play([{"box": [500, 0, 1000, 500]}], [])
    ((caption, pixels),) = shown(found)
    assert caption == "Image 1:"
    assert np.array_equal(pixels, PIXELS[:20, 50:])
    assert (answered.observation, answered.done, answered.info) == ("", True, {"zooms": 1})


def test_a_crop_is_an_image_that_a_later_call_may_name() -> None:
    first, second, third = play(
        [{"box": [500, 0, 1000, 500]}], [{"box": [0, 0, 500, 500], "image": 1}], [{"box": [0, 0, 100, 100]}]
    )
    assert np.array_equal(shown(second)[0][1], PIXELS[:10, 50:75])
    assert shown(second)[0][0] == "Image 2:"
    assert np.array_equal(shown(third)[0][1], PIXELS[:4, :10])


def test_boxes_may_be_in_pixels_and_end_at_the_image() -> None:
    (found,) = play([{"box": [90, -5, 400, 3.4]}], units="pixels", caption="")
    ((caption, pixels),) = shown(found)
    assert caption == "" and np.array_equal(pixels, PIXELS[:3, 90:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "zoom takes"),
        ({"box": [0, 0, 10]}, "zoom takes"),
        ({"box": "0,0,10,10"}, "zoom takes"),
        ({"box": [0, 0, True, 10]}, "zoom takes"),
        ({"box": [0, 0, float("nan"), 10]}, "zoom takes"),
        ({"box": [0, 0, float("inf"), 10]}, "zoom takes"),
        ({"box": [0, 0, 10**400, 10]}, "zoom takes"),
        ({"box": [0, 0, 500, 500], "scale": 2}, "zoom takes"),
        ({"box": [0, 0, 500, 500], "image": 1}, "There is no image 1; there are 0 to 0."),
        ({"box": [0, 0, 500, 500], "image": -1}, "There is no image -1"),
        ({"box": [0, 0, 500, 500], "image": True}, "There is no image True"),
        ({"box": [500, 0, 500, 500]}, "has 0 x 20 pixels; each side needs 8."),
        ({"box": [600, 0, 500, 500]}, "has -10 x 20 pixels"),
        ({"box": [0, 0, 79, 1000]}, "has 8 x 40 pixels"),
    ],
)
def test_a_call_without_a_visible_area_gets_the_reason_and_does_not_zoom(arguments: dict[str, Any], said: str) -> None:
    least = 9 if "8 x 40" in said else 8
    (told,) = play([arguments], min_pixels=least)
    (text,) = shown(told)
    assert isinstance(text, str) and said in text
    assert told.info == {"zooms": 0}


def test_an_image_below_the_smallest_crop_may_be_seen_whole() -> None:
    (found,) = play([{"box": [0, 0, 1000, 1000]}], min_pixels=64)
    assert "has 100 x 40 pixels" not in str(shown(found)[0][0])
    assert np.array_equal(shown(found)[0][1], PIXELS)


def test_a_zoom_beyond_the_limit_is_refused() -> None:
    (found,) = play([{"box": [0, 0, 500, 500]}] * 2, max_zooms=1)
    assert shown(found)[1] == "No zooms are left; answer with what was seen."
    assert found.info == {"zooms": 1}


def test_turned_photos_are_cropped_as_the_model_sees_them() -> None:
    turned, file = Image.fromarray(PIXELS), io.BytesIO()
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(file, "PNG", exif=exif)
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    (found,) = play([{"box": [0, 0, 1000, 500]}], at=task(Media("image", source)))
    assert np.array_equal(shown(found)[0][1], np.rot90(PIXELS, -1)[:50])


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (Task("t", "which?"), "task t has no image"),
        (task(Media("audio", "a.wav")), "task t has no image"),
        (task(Media("image", "data:image/png;base64,AAAA")), "none of the formats"),
        (task(Media("image", "https://images.example.org/1.png")), "allowed_hosts"),
    ],
)
def test_a_task_without_a_readable_image_is_an_error_with_its_reason(at: Task, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        play(at=at)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ValueError, match="environment.max_megapixels allows 0.001"):
        play(max_megapixels=0.001)


def test_a_path_is_read_as_the_task_names_it(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    (found,) = play([{"box": [0, 0, 1000, 1000]}], at=task(Media("image", str(tmp_path / "a.png"))))
    assert np.array_equal(shown(found)[0][1], PIXELS)


@pytest.mark.parametrize("caption", ["{name}", "{", "{number.a}"])
def test_a_caption_with_another_place_is_refused(caption: str) -> None:
    with pytest.raises(ValidationError, match=r"the only placeholder is \{number\}"):
        ZoomOptions(caption=caption)
