# SPDX-License-Identifier: Apache-2.0
"""Task files and media: what `relax data check` and a rollout read."""

from __future__ import annotations

import io
import json
import shutil
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from relax_plugin_workbench.data_survey import data_files, survey, survey_overlap

from relax_core.api.component import Chosen
from relax_core.api.task import Media
from relax_core.media.access import SourceAccess
from relax_core.media.source import read_source, restricted
from tests.fuzz.configuration_inputs import SECRET, Files, installed
from tests.fuzz.mutations import json_bytes, mutate_bytes, mutate_tree
from tests.unit.media import clips

ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "s21=", "answer": "12", "id": "a", "level": 3},
    {"prompt": [{"role": "system", "content": "Sort."}, {"role": "user", "content": "s43="}], "answer": ["34"]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]}]},
    {"prompt": "look <image>", "images": [{"bytes": "aGVsbG8=", "path": None}], "answer": 1.5, "environment": "x"},
    {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "name": "f", "content": "y"}]},
    {"prompt": "hear <audio>", "audio": {"array": [0.0, 0.5], "sampling_rate": 16000}},
    {"prompt": [{"role": "user", "content": [{"type": "video", "video": "file:///etc/passwd", "view": [0, 1.5]}]}]},
    {"prompt": "far <image>", "image": "https://example.invalid/a.png?token=" + SECRET},
)  # fmt: skip


def lines_input(random: Random) -> Files:
    lines = [json_bytes(row, random) if random.random() < 0.4 else json.dumps(row).encode()
             for row in random.choices(ROWS, k=4)]  # fmt: skip
    if random.random() < 0.3:
        return {"tasks.json": b"[" + b",".join(lines) + random.choice((b"]", b"", b"]]", b",]"))}
    return {"tasks.jsonl": random.choice((b"\n", b"\n", b"\r\n", b"\n\n", b"")).join(lines)}


@cache
def tables() -> Files:
    import pyarrow as pa
    from pyarrow import feather, parquet

    picture = clips.picture(1, 8)
    columns = {
        "prompt": ["see <image>", "see <image>"], "answer": ["1", "2"], "level": [1, 2],
        "images": [[{"bytes": picture, "path": "a.png"}], [{"bytes": picture, "path": None}]],
    }  # fmt: skip
    table = pa.table(columns)
    first, second, third = io.BytesIO(), io.BytesIO(), io.BytesIO()
    parquet.write_table(table, first)
    feather.write_feather(table, second, compression="uncompressed")
    with pa.ipc.new_stream(third, table.schema) as stream:
        stream.write_table(table)
    return {"tasks.parquet": first.getvalue(), "tasks.arrow": second.getvalue(), "stream.arrow": third.getvalue()}


def table_input(random: Random) -> Files:
    import pyarrow as pa
    from pyarrow import parquet

    if random.random() < 0.3:  # a whole table of strange columns
        rows = [row for row in (mutate_tree(row, random) for row in random.choices(ROWS, k=2)) if isinstance(row, dict)]
        out = io.BytesIO()
        try:
            parquet.write_table(pa.Table.from_pylist(rows), out)
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            return {"tasks.parquet": b"PAR1"}
        return {"tasks.parquet": out.getvalue()}
    name, body = random.choice(sorted(tables().items()))
    return {f"tasks{Path(name).suffix}": mutate_bytes(body, random)}


def feed_tasks(folder: Path) -> None:
    """Read every row, as `relax data check` does, and then the bytes of the media that the rows hold."""
    (file,) = folder.iterdir()
    for found in data_files(file, None):
        survey_overlap(found, survey(found), None)
        access = SourceAccess((), [str(folder)], 0.2)
        for row in range(len(found.source)):
            prompt = found.source[row].prompt
            for message in () if isinstance(prompt, str) else prompt:
                for part in () if isinstance(message.content, str) else message.content:
                    if part.media is not None:
                        with restricted(access, 1 << 20):
                            try:
                                data = read_source(part.media.source)
                            except ValueError as error:
                                _one_line(error)
                            else:
                                assert b"root:" not in data


def _one_line(error: Exception) -> None:
    assert str(error).isprintable() or "\t" in str(error), repr(str(error))


@cache
def media_seeds() -> tuple[tuple[str, bytes], ...]:
    from PIL import Image

    found = [("image", clips.picture(1, 16))]
    for form in ("JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO"):
        out = io.BytesIO()
        Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(out, form)
        found.append(("image", out.getvalue()))
    found += [
        ("audio", clips.sound(1, 0.2)),
        ("video", clips.video(1, 4, 16)),
        ("video", clips.video(2, 4, 16, tone_hz=440)),
    ]
    return tuple(found)


def media_input(random: Random) -> Files:
    kind, body = random.choice(media_seeds())
    choice = random.random()
    if choice < 0.08:
        body = _bomb(random)
    elif choice < 0.12:
        body = random.randbytes(random.choice((0, 1, 100)))
    elif choice < 0.2:
        other = random.choice(media_seeds())[1]
        body = body[: random.randrange(len(body))] + other[random.randrange(len(other)) :]
    else:
        body = mutate_bytes(body, random)
    return {f"medium.{kind}": body}


def _bomb(random: Random) -> bytes:
    """A small file that promises, or unpacks to, very much."""
    import zlib
    from struct import pack

    def chunk(name: bytes, body: bytes) -> bytes:
        return pack(">I", len(body)) + name + body + pack(">I", zlib.crc32(name + body))

    wide, high = random.choice(
        ((30_000, 30_000), (65_535, 65_535), (2**31 - 1, 1), (1, 2**31 - 1), (0, 0), (12_000, 9_000))
    )
    rows = zlib.compress(bytes(1 << 22), 9)
    choice = random.randrange(4)
    if choice == 0:
        return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", pack(">IIBBBBB", wide % 2**32, high % 2**32, 8, 2, 0, 0, 0))
                + chunk(b"IDAT", rows) + chunk(b"IEND", b""))  # fmt: skip
    if choice == 1:  # text that unpacks to much more than the picture
        picture = chunk(b"IDAT", zlib.compress(bytes(52))) + chunk(b"IEND", b"")
        head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0))
        return head + chunk(b"zTXt", b"a\x00\x00" + rows) * 8 + picture
    if choice == 2:
        return (
            b"BM"
            + pack("<IHHI", 54, 0, 0, 54)
            + pack("<IiiHHIIiiII", 40, wide % 2**31, high % 2**31, 1, 24, 0, 0, 0, 0, 0, 0)
        )
    rate, channels = random.choice(((1, 1), (2**31 - 1, 2), (44_100, 65_535), (0, 1)))
    form = pack("<HHIIHH", 1, channels, rate, rate % 2**30, 2, 16)
    return (
        b"RIFF"
        + pack("<I", 2**32 - 1)
        + b"WAVEfmt "
        + pack("<I", 16)
        + form
        + b"data"
        + pack("<I", 2**32 - 1)
        + bytes(64)
    )


VISION: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "tokens_per_second": 2, "model_type": "qwen2_5_vl"}, "image_token_id": 5, "video_token_id": 6, "audio_token_id": 7,
    "audio_config": {"num_mel_bins": 128, "n_window": 100},
}  # fmt: skip


def feed_medium(folder: Path) -> None:
    """Count its tokens, process and describe it, as the host of a processor does; it runs in a process that may be killed."""
    (file,) = [path for path in folder.iterdir() if path.name.startswith("medium.")]
    kind = file.suffix[1:]
    config = folder / "model"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(VISION))
    model = {"path": str(config)}
    processor: Any = installed().build(Chosen("modality-processor", kind, {}))
    media = Media(kind, str(file))  # type: ignore[arg-type]
    with restricted(SourceAccess((), [str(folder)]), 1 << 24):
        data = read_source(media.source)
        for work in (
            lambda: processor.budget(media, model), lambda: processor.process(media, data, model),
            lambda: processor.facts(media, data), lambda: processor.preview(media, data, 1 << 14),
        ):  # fmt: skip
            try:
                work()
            except ValueError as error:
                refused = error
                _one_line(refused)
    shutil.rmtree(config)
