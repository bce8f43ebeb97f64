# SPDX-License-Identifier: Apache-2.0
"""Tables and dataset folders as tasks: media stay in the file until they are read, and rows are the same however asked."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from relax_core.api.errors import ConfigError
from relax_core.data.task_files import Files, TableSource, TableSourceOptions, table_files
from relax_core.media.placeholders import media_of
from relax_core.media.source import EmbeddedMedia, read_source, shown

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
SOUND = pa.struct({"array": pa.list_(pa.float32()), "sampling_rate": pa.int64()})
FORMS = ("parquet", "saved", "hub")


def blob(number: int, at: int = 0) -> bytes:
    return random.Random(f"{number} {at}").randbytes(5000)


def rows(count: int = 20) -> pa.Table:
    """Row n has n % 3 images in its prompt, its own answer and a level."""
    images = [[{"bytes": blob(n, at), "path": f"{n}-{at}.png"} for at in range(n % 3)] for n in range(count)]
    prompts = [[{"role": "user", "content": "<image>" * (n % 3) + f"row {n}"}] for n in range(count)]
    return pa.table(
        {
            "prompt": prompts,
            "images": pa.array(images, pa.list_(IMAGE)),
            "answer": [str(n) for n in range(count)],
            "level": list(range(count)),
        }
    )


def stored(table: pa.Table, form: str, folder: Path) -> Path:
    """As people have it: one Parquet file, a folder that `datasets` saved, or Parquet shards with a split's name."""
    if form == "parquet":
        parquet.write_table(table, folder / "tasks.parquet", row_group_size=7)
        return folder / "tasks.parquet"
    half = table.num_rows // 2
    shards = [table.slice(0, half), table.slice(half)]
    for number, shard in enumerate(shards):
        name = f"{'data' if form == 'saved' else 'train'}-{number:05}-of-00002"
        if form == "hub":
            parquet.write_table(shard, folder / f"{name}.parquet", row_group_size=7)
            continue
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as out, pa.ipc.new_stream(out, shard.schema) as stream:
            stream.write_table(shard, max_chunksize=4)
    if form == "saved":
        (folder / "state.json").write_text("{}")
    return folder


def opened(path: Path, columns: dict[str, str] | None = None) -> Files:
    source = Files()
    source.open(str(path), columns or {})
    return source


def contents(source: Files, index: int) -> list[bytes]:
    prompt = source[index].prompt
    return [] if isinstance(prompt, str) else [read_source(media.source) for media in media_of(prompt)]


@pytest.mark.parametrize("form", FORMS)
def test_rows_come_with_their_media_by_reference(tmp_path, form):
    source = opened(stored(rows(), form, tmp_path))
    assert len(source) == 20
    for index in random.Random(0).sample(range(20), 20):
        task = source[index]
        assert (task.answer, dict(task.metadata)) == (str(index), {"level": index})
        assert task.prompt[0].text == f"row {index}"
        assert contents(source, index) == [blob(index, at) for at in range(index % 3)]
        assert len(repr(task)) < 2000, "bytes travel in the task"


@pytest.mark.parametrize("form", FORMS)
def test_a_source_that_is_opened_again_continues_with_the_same_tasks(tmp_path, form):
    path = stored(rows(), form, tmp_path)
    before, after = opened(path), opened(path)
    assert [after[index] for index in range(11, 20)] == [before[index] for index in range(20)][11:]
    assert [after.where(index) for index in range(20)] == [before.where(index) for index in range(20)]
    assert len({before.where(index) for index in range(20)}) == len({before[index].id for index in range(20)}) == 20


def test_blocks_in_memory_stay_within_their_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_core.data.task_files.CACHED_BYTES", 1500)
    source = TableSource()
    source.open(str(stored(rows(), "parquet", tmp_path)), {})
    for index in (0, 19, 8, 1, 15) * 2:
        assert source[index].answer == str(index)
        cache = source._files[0].cache
        assert cache.size_bytes == sum(block.nbytes for block in cache.blocks.values())
        assert cache.size_bytes <= 1500 or len(cache.blocks) == 1


def test_the_memory_of_a_block_grows_with_text_and_not_with_media(tmp_path):
    (file,) = table_files(stored(rows(), "parquet", tmp_path), "")
    assert file.block(0).nbytes < 5000


def test_bytes_as_they_are_arrays_of_sound_and_paths(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    samples = [0.0, 0.5, -0.5]
    table = pa.table(
        {
            "prompt": ["<audio><image>?"] * 2,
            "audio": pa.array([{"array": samples, "sampling_rate": 8000}] * 2, SOUND),
            "image": pa.array([b"pixels", b"others"], pa.binary()),
            "hear": pa.array([{"bytes": None, "path": "a.wav"}] * 2, IMAGE),
        }
    )
    for form in FORMS:
        folder = tmp_path / form
        folder.mkdir()
        source = opened(stored(table, form, folder))
        sound, image = contents(source, 1)
        assert image == b"others" and sound.startswith(b"RIFF")
        assert np.frombuffer(sound[-12:], "<f4").tolist() == samples
        assert dict(source[0].metadata)["hear"]["bytes"] is None
        (folder / "a.wav").write_bytes(b"RIFF")
        named = opened(stored(table, form, folder), {"audio": "hear"})
        assert contents(named, 0)[0] == b"RIFF"


def test_messages_that_hold_media_themselves(tmp_path):
    part = pa.struct({"type": pa.string(), "text": pa.string(), "image": IMAGE})
    message = pa.struct({"role": pa.string(), "content": pa.list_(part)})
    content = [{"type": "image", "image": {"bytes": b"pixels", "path": None}}, {"type": "text", "text": "which?"}]
    table = pa.table({"messages": pa.array([[{"role": "user", "content": content}]] * 2, pa.list_(message))})
    for form in FORMS:
        (tmp_path / form).mkdir()
        source = opened(stored(table, form, tmp_path / form))
        assert contents(source, 1) == [b"pixels"] and source[1].prompt[0].text == "which?"


def test_a_folder_with_several_splits_is_refused_with_their_names(tmp_path):
    for split in ("train", "test"):
        parquet.write_table(rows(3 if split == "test" else 5), tmp_path / f"{split}-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"the splits test, train; choose one"):
        opened(tmp_path)
    chosen = Files(TableSourceOptions(split="test"))
    chosen.open(str(tmp_path), {})
    assert len(chosen) == 3
    with pytest.raises(ConfigError, match="dev"):
        Files(TableSourceOptions(split="dev")).open(str(tmp_path), {})


def test_bad_rows_are_named_and_the_others_are_read(tmp_path):
    table = pa.table({"prompt": ["<image>a", "b", "<image><image>c"], "images": [["1.png"], ["1.png"], ["1.png"]]})
    source = Files()
    with pytest.raises(ConfigError, match=r"tasks.parquet row 2: 0 places for image in the prompt, but 1 media in"):
        source.open(str(stored(table, "parquet", tmp_path)), {})
    assert [problem.where.partition(" row ")[2] for problem in source.problems()] == ["2", "3"]
    assert len(source) == 1


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no table"], ids=["empty", "cut", "other"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_file_that_is_not_a_table_is_refused(tmp_path, suffix, data):
    (tmp_path / f"a{suffix}").write_bytes(data)
    with pytest.raises(ConfigError, match=f"a{suffix}"):
        opened(tmp_path / f"a{suffix}")


def test_a_changed_file_is_reported_when_its_media_are_read(tmp_path):
    path = stored(rows(), "parquet", tmp_path)
    (media,) = media_of(opened(path)[19].prompt)
    parquet.write_table(rows(3), path)
    with pytest.raises(ValueError, match="was changed"):
        read_source(media.source)
    path.unlink()
    with pytest.raises(ValueError, match="can't be read"):
        read_source(media.source)


def test_long_data_uris_of_json_lines_stay_in_their_rows(tmp_path):
    import base64

    uri = "data:image/png;base64," + base64.b64encode(blob(0)).decode()
    whole = {"prompt": "<image><image>x", "images": [uri, {"bytes": base64.b64encode(blob(1)).decode()}]}
    part = {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]}
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "plain"}, whole, part)))
    source = opened(path)
    assert contents(source, 1) == [blob(0), blob(1)] and contents(source, 2) == [blob(0)]
    assert len(repr(source[1])) < 2000
    assert shown(media_of(source[1].prompt)[0].source).startswith("images.0 in the line at byte ")


def test_a_cell_is_named_as_text(tmp_path):
    cell = EmbeddedMedia(str(tmp_path / "with ?&#.parquet"), 3, ("images", 1))
    assert EmbeddedMedia.parse(str(cell)) == cell
    with pytest.raises(ValueError, match="names no row"):
        EmbeddedMedia.parse("cell:/a?row=x")


def test_memory_while_one_medium_is_read_does_not_grow_with_its_row_group(tmp_path):
    noise = [np.random.default_rng(n).bytes(100_000) for n in range(4)]
    table = pa.table(
        {"prompt": ["<image>"] * 400, "image": pa.array([{"bytes": noise[n % 4]} for n in range(400)], IMAGE)}
    )
    out = io.BytesIO()
    parquet.write_table(table, out, row_group_size=400, use_dictionary=False, write_batch_size=8)
    (tmp_path / "a.parquet").write_bytes(out.getvalue())
    del table, out
    source = opened(tmp_path / "a.parquet")
    usual, watched = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(watched)
    try:
        assert contents(source, 399) == [noise[3]]
    finally:
        pa.set_memory_pool(usual)
    assert 100_000 < watched.max_memory() < 12_000_000
