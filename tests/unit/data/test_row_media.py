# SPDX-License-Identifier: Apache-2.0
"""Placeholders of texts and columns of media: each comes to its place, in order, or the row is refused with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message
from relax_core.config.tables import DataTable, MediaSourcesTable
from relax_core.data.task_files import source_access
from relax_core.data.task_row import COLUMNS, MediaOrigin, RowError, row_task
from relax_core.media.placeholders import media_of
from relax_core.media.source import read_source

HOME = MediaOrigin(Path("/data"))
PIECES = st.lists(st.sampled_from(["<image>", "<video>", "<audio>", "word ", "<img>", "\n"]), min_size=1, max_size=12)


def task(row, columns=None):
    return row_task(row, columns or {}, "1", HOME)


@given(pieces=PIECES, as_messages=st.booleans(), extra=st.integers(-1, 1))
def test_each_placeholder_shows_the_next_of_its_column(pieces, as_messages, extra):
    text = "".join(pieces)
    counts = {kind: pieces.count(f"<{kind}>") for kind in COLUMNS}
    media = {f"{kind}s": [f"{kind}{n}" for n in range(count)] for kind, count in counts.items()}
    given_media = {**media, "images": [f"image{n}" for n in range(counts["image"] + extra)]}
    row = {"prompt": [{"role": "user", "content": text}] if as_messages else text, **given_media}
    if len(given_media["images"]) != counts["image"]:
        with pytest.raises(
            RowError, match=f"{counts['image']} places for image in the prompt, but {extra + counts['image']}"
        ):
            task(row)
        return
    made = task(row).prompt
    if not sum(counts.values()):
        assert made == (text if not as_messages else (Message("user", text),))
        return
    shown = [f"<{media.kind}>" for media in media_of(made)]
    assert shown == [piece for piece in pieces if piece[1:-1] in COLUMNS]
    assert [m.source for m in media_of(made) if m.kind == "video"] == [f"/data/{name}" for name in media["videos"]]
    parts = made[0].content
    assert "".join(part.text if part.media is None else f"<{part.media.kind}>" for part in parts) == text


def test_texts_of_rows_without_media_columns_stay_as_they_are():
    assert task({"prompt": "the tag <video> of HTML"}).prompt == "the tag <video> of HTML"
    assert task({"prompt": "<image>", "images": ["a"]}, {"images": "none"}).prompt == "<image>"


def test_parts_that_name_no_medium_take_the_next_of_the_column():
    content = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image", "view": [0, 1]}]
    row = {"prompt": [{"role": "user", "content": content}], "images": ["a.png", "https://b/c.png"]}
    first, second = media_of(task(row).prompt)
    assert (first.source, second.source, second.view) == ("/data/a.png", "https://b/c.png", (0.0, 1.0))


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("a.png", "/data/a.png"),
        ({"path": "a.png"}, "/data/a.png"),
        ({"path": "a.png", "bytes": None}, "/data/a.png"),
        ({"url": "https://a/b"}, "https://a/b"),
        ({"image": "data:,x"}, "data:,x"),
        ({"bytes": b"x", "path": "a.png"}, "data:;base64,eA=="),
        ({"bytes": "eA=="}, "data:;base64,eA=="),
        (b"x", "data:;base64,eA=="),
    ],
)
def test_media_come_in_every_usual_form(entry, source):
    (media,) = media_of(task({"prompt": "<image>", "image": entry}).prompt)
    assert media.source == source
    inside = [{"role": "user", "content": [{"type": "image", "image": entry}]}]
    assert media_of(task({"prompt": inside}).prompt) == [media]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (3, "images.*no path"), ({}, "neither path, url nor bytes"), ([None], r"images\[0\]"), ({"bytes": b""}, "no bytes"),
        ({"bytes": "!"}, "base64 is broken"), ({"array": [0.1], "sampling_rate": None}, "sampling_rate is None"),
        ({"array": ["a"], "sampling_rate": 8000}, "values that are not numbers"), ({"path": "a", "view": 3}, "view"),
        ({"array": [], "sampling_rate": 8000}, "shape"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_a_medium_is_refused_with_its_place(entry, reason):
    with pytest.raises(RowError, match=reason):
        task({"prompt": "<image>", "images": entry})


def test_an_array_of_sound_becomes_a_file_of_sound():
    import io

    import numpy as np
    import soundfile

    wave = np.sin(np.arange(800) / 9).astype(np.float32)
    for samples in (wave.tolist(), [wave.tolist(), (-wave).tolist()]):
        (media,) = media_of(task({"prompt": "<audio>", "audio": {"array": samples, "sampling_rate": 8000}}).prompt)
        heard, rate = soundfile.read(io.BytesIO(read_source(media.source)), dtype="float32", always_2d=True)
        assert rate == 8000 and np.array_equal(heard[:, 0], wave) and heard.shape[1] == np.ndim(samples)


def test_rows_reach_the_folder_of_their_file_and_those_that_are_named(tmp_path):
    for name in ("run", "run/pictures", "shards", "cache", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"abc")
    (tmp_path / "cache" / "blob").touch()
    (tmp_path / "shards" / "train.parquet").symlink_to(tmp_path / "cache" / "blob")
    train = tmp_path / "run" / "tasks.jsonl"
    sources = MediaSourcesTable(allowed_hosts=("a.test",), allowed_folders=(tmp_path / "other",), fetch_timeout_s=3)
    access = source_access(DataTable(train=train, media=sources), [train, tmp_path / "shards"])
    assert (tuple(access.allowed_hosts), access.fetch_timeout_s) == (("a.test",), 3)
    for name in ("run/a.png", "run/pictures/a.png", "shards/a.png", "shards/train.parquet", "other/a.png"):
        access.check_file(tmp_path / name)
    for name in ("cache/a.png", "other/../cache/a.png", "run/../cache/a.png"):
        with pytest.raises(ConfigError, match="allowed_folders"):
            access.check_file(tmp_path / name)
