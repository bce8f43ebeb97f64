# SPDX-License-Identifier: Apache-2.0
"""A null medium of a table stays null, however it is written; bytes that no row shows never matter."""

import base64
import random

import pyarrow as pa
import pytest
from pyarrow import parquet

from relax_core.data.plain_data import Embedded
from relax_core.data.task_files import table_files
from relax_core.media.placeholders import media_of
from relax_core.media.source import read_source
from tests.odd_inputs.test_rows import opened, travels, written

BYTES = pa.struct({"bytes": pa.binary()})
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
SOUND = pa.struct({"array": pa.list_(pa.float32()), "sampling_rate": pa.int64()})
SUFFIXES = pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
COLUMNS = {
    "bytes": (pa.array([b"a", None, b"c"]), [["a"], [], ["c"]]),
    "only nulls": (pa.nulls(3, pa.binary()), [[], [], []]),
    "bytes in structs": (pa.array([{"bytes": b"a"}, None, {"bytes": None}], BYTES), [["a"], [], []]),
    "structs": (
        pa.array([{"bytes": b"a", "path": "x.png"}, None, {"bytes": None, "path": None}], IMAGE), [["a"], [], []],
    ),
    "structs of nulls alone": (pa.array([{"bytes": None, "path": None}] * 3, IMAGE), [[], [], []]),
    "structs or null": (pa.array([None, {"bytes": b"b", "path": None}, None], IMAGE), [[], ["b"], []]),
    "structs with paths": (
        pa.array([{"bytes": None, "path": "f.png"}, {"bytes": b"b", "path": "g.png"}, None], IMAGE),
        [["file"], ["b"], []],
    ),
    "lists of structs": (
        pa.array([[{"bytes": b"a", "path": None}] * 2, [], None], pa.list_(IMAGE)), [["a", "a"], [], []],
    ),
    "lists of paths and bytes": (
        pa.array([[{"bytes": None, "path": "f.png"}, {"bytes": b"b"}], [{"bytes": b"c"}], []], pa.list_(IMAGE)),
        [["file", "b"], ["c"], []],
    ),
    "lists of bytes": (pa.array([[b"a", b"b"], [], None]), [["a", "b"], [], []]),
    "lists of bytes in structs": (pa.array([[{"bytes": b"a"}], [], None], pa.list_(BYTES)), [["a"], [], []]),
    "large lists": (pa.array([[b"a"], [], None], pa.large_list(pa.large_binary())), [["a"], [], []]),
    "base64 text": (pa.array([f"data:;base64,{base64.b64encode(b'a').decode()}", None, None]), [["a"], [], []]),
}  # fmt: skip
"""Name -> (column of three rows, bytes of the media in each row)."""


@SUFFIXES
@pytest.mark.parametrize("name", COLUMNS)
def test_a_null_medium_is_no_medium(tmp_path, name, suffix):
    column, expected = COLUMNS[name]
    (tmp_path / "f.png").write_bytes(b"file")
    prompts = ["<image>" * len(media) + "?" for media in expected]
    source, bad = opened(written(tmp_path / f"tasks{suffix}", {"prompt": prompts, "images": column}))
    assert not bad and len(source) == 3
    shown = [media_of(task.prompt) if isinstance(task.prompt, tuple) else [] for task in map(travels, source)]
    assert [[read_source(media.source).decode() for media in row] for row in shown] == expected


@SUFFIXES
@pytest.mark.parametrize("name", COLUMNS)
def test_bytes_that_no_row_shows_never_matter(tmp_path, name, suffix):
    source, bad = opened(written(tmp_path / f"tasks{suffix}", {"prompt": ["<image>"] * 3, "thing": COLUMNS[name][0]}))
    assert not bad and [travels(task).prompt for task in source] == ["<image>"] * 3


@SUFFIXES
def test_a_null_sound_is_no_sound(tmp_path, suffix):
    sounds = [{"array": [0.5], "sampling_rate": 8000}, {"array": None, "sampling_rate": None}, None]
    table = {"prompt": ["<audio>", "q", "q"], "audio": pa.array(sounds, SOUND)}
    source, bad = opened(written(tmp_path / f"tasks{suffix}", table))
    assert not bad and read_source(media_of(source[0].prompt)[0].source).startswith(b"RIFF")
    assert [source[1].prompt, source[2].prompt] == ["q", "q"]


@SUFFIXES
def test_parts_of_messages_without_a_medium_are_texts(tmp_path, suffix):
    part = pa.struct({"type": pa.string(), "text": pa.string(), "image": IMAGE})
    message = pa.struct({"role": pa.string(), "content": pa.list_(part)})
    none = {"bytes": None, "path": None}
    parts = [{"type": "text", "text": "a", "image": none}, {"type": "text", "text": "b", "image": None}]
    shown = [{"type": "image", "text": None, "image": {"bytes": b"c", "path": None}}, *parts]
    rows = [[{"role": "user", "content": parts}], [{"role": "user", "content": shown}]]
    source, bad = opened(written(tmp_path / f"tasks{suffix}", {"messages": pa.array(rows, pa.list_(message))}))
    assert not bad and [task.prompt[0].text for task in source] == ["ab", "ab"]
    assert [[read_source(media.source) for media in media_of(task.prompt)] for task in source] == [[], [b"c"]]


def test_the_media_of_a_row_group_without_null_media_are_not_read(tmp_path, monkeypatch):
    rows = [[{"bytes": b"a" * 1000, "path": "x"}], [], None, [{"bytes": b"b" * 1000, "path": None}]]
    table = {"prompt": ["<image>", "q", "r", "<image>"], "images": pa.array(rows, pa.list_(IMAGE))}
    path = written(tmp_path / "tasks.parquet", {**table, "thing": [[b"a"], None, [], [b"b"]]})
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", None)
    source, bad = opened(path)
    assert not bad and len(source) == 4


CONTENT = pa.list_(pa.struct({"text": pa.string(), "image": IMAGE}))
KINDS = {
    "bytes": pa.binary(), "structs": IMAGE, "lists": pa.list_(IMAGE), "lists of bytes": pa.list_(pa.binary()),
    "lists of bytes in structs": pa.list_(BYTES), "lists of lists": pa.list_(pa.list_(IMAGE)), "sounds": SOUND,
    "messages": pa.list_(pa.struct({"role": pa.string(), "content": CONTENT})),
}  # fmt: skip


def made(kind, draw, nulls):
    """Return a random value of an Arrow type; `nulls` is the share of nulls at each level."""
    if draw.random() < nulls:
        return None
    if pa.types.is_struct(kind):
        return {field.name: made(field.type, draw, nulls) for field in kind}
    if pa.types.is_list(kind):
        return [
            made(kind.value_type, draw, 0.0 if kind == SOUND["array"].type else nulls) for _ in range(draw.randrange(3))
        ]
    return (
        b"x"
        if pa.types.is_binary(kind)
        else 1.0
        if pa.types.is_floating(kind)
        else 1
        if pa.types.is_integer(kind)
        else "a"
    )


def without_media(value):
    if isinstance(value, dict):
        return {name: without_media(value[name]) for name in sorted(value)}
    return (
        [*map(without_media, value)] if isinstance(value, list) else "bytes" if isinstance(value, Embedded) else value
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_parquet_file_has_the_nulls_of_an_arrow_file(tmp_path, name):
    draw = random.Random(name)
    for number, nulls in enumerate((0.0, 0.2, 0.5, 1.0) * 2):
        column = pa.array([made(KINDS[name], draw, nulls) for _ in range(7)], KINDS[name])
        table = pa.table({"prompt": ["q"] * 7, "thing": column})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
        paths = tmp_path / f"{number}.parquet", written(tmp_path / f"{number}.arrow", table)
        first, second = (table_files(path, "", ["thing"])[0] for path in paths)
        assert [without_media(row) for _, row in first.rows()] == [without_media(row) for _, row in second.rows()]


def test_a_file_without_statistics_is_read_with_its_nulls(tmp_path):
    path = tmp_path / "tasks.parquet"
    parquet.write_table(pa.table({"prompt": ["<image>", "q"], "image": [b"a", None]}), path, write_statistics=False)
    source, bad = opened(path)
    assert not bad and read_source(media_of(source[0].prompt)[0].source) == b"a"
