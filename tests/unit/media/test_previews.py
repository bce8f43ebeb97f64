# SPDX-License-Identifier: Apache-2.0
"""Which media of samples a sink shows: copies of the run directory, few of each step, and each once a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.media.previews import REMEMBERED_STEPS, SampleMedia, read_preview

PNG, WEBM, WAV = b"\x89PNG....", b"\x1a\x45\xdf\xa3....", b"RIFF....WAVE...."


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for folder, name, data in (
        ("media", "a.image", PNG), ("media", "b.video", WEBM), ("stages/1-rl/media", "c.audio", WAV),
        ("media", "d.image", b"<html>"), ("media", "e.image", PNG + b"e"),
    ):  # fmt: skip
        (tmp_path / folder / "previews").mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "previews" / name).write_bytes(data)
    return tmp_path


def sample(*media: str, task: str = "t", field: str = "prompt") -> dict[str, Any]:
    """Return a sample with media such as `image:a`, beside parts without a medium."""
    parts = [{"type": kind, "key": key, "source": "x"} for kind, key in (each.split(":") for each in media)]
    return {"task_id": task, "prompt": "words", field: [
        {"role": "system", "content": "image:a"},
        {"role": "user", "content": [{"type": "image", "source": "not processed"}, *parts, {"type": "text", "text": "?"}]},
    ]}  # fmt: skip


def test_each_medium_with_a_copy_is_shown_once_a_step(run_dir: Path) -> None:
    media = SampleMedia(str(run_dir), 9)
    samples = [
        sample("image:a", "video:b", "image:gone", task="t1"),
        sample("image:a", "audio:c", "image:d", field="messages"),
    ]
    shown = media.take(1, samples)
    assert [(one.kind, one.number, one.task, one.form, one.suffix, one.data) for one in shown] == [
        ("image", 1, "t1", "image/png", "png", PNG), ("video", 2, "t1", "video/webm", "webm", WEBM),
        ("audio", 3, "t", "audio/wav", "wav", WAV),
    ]  # fmt: skip
    assert media.take(1, samples) == [] and media.take(2, samples) == shown
    assert media.take(3, [{"task_id": "t", "prompt": "image:a"}, {}]) == []


def test_deliveries_of_a_step_share_its_limit(run_dir: Path) -> None:
    media = SampleMedia(str(run_dir), 2)
    assert [one.number for one in media.take(1, [sample("image:a")])] == [1]
    assert media.take(2, [sample("image:a")])[0].number == 1
    assert [(one.number, one.kind) for one in media.take(1, [sample("audio:c", "video:b")])] == [(2, "audio")]
    assert media.take(1, [sample("image:e")]) == []
    assert SampleMedia(str(run_dir), 0).take(1, [sample("image:a")]) == []
    for step in range(REMEMBERED_STEPS + 2):
        media.take(10 + step, [sample("image:a")])
    assert len(media._shown) == REMEMBERED_STEPS


def test_a_sink_gets_only_the_types_that_it_shows(run_dir: Path) -> None:
    media = SampleMedia(str(run_dir), 2, ("image/", "audio/wav"))
    shown = media.take(1, [sample("video:b", "image:a", "audio:c")])
    assert [(one.number, one.kind) for one in shown] == [(1, "image"), (2, "audio")]


def test_a_key_names_only_files_of_the_folder(run_dir: Path) -> None:
    assert read_preview(run_dir, "image", "a") == PNG and read_preview(run_dir, "audio", "c") == WAV
    (run_dir / "media" / "x.image").write_bytes(PNG)
    assert [
        read_preview(run_dir, kind, key) for kind, key in (("image", "../x"), ("../image", "a"), ("image", ""))
    ] == [None] * 3
