# SPDX-License-Identifier: Apache-2.0
"""Compressed task files are read like plain ones; a file of another format is refused with what to do."""

import base64
import bz2
import gzip
import json
import lzma
from contextlib import suppress

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from relax_plugin_workbench.try_run import _rows
from typer.testing import CliRunner

from relax_core.api import ConfigError
from relax_core.cli.main import app
from relax_core.data.task_files import Files
from relax_core.media.placeholders import media_of
from relax_core.media.source import read_source
from tests.odd_inputs.test_rows import opened, travels, written

PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
ROWS = [{"prompt": f"q{number}", "answer": str(number)} for number in range(50)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("suffix", "data"), [("jsonl", LINES), ("json", json.dumps(ROWS).encode())], ids=["lines", "list"]
)
def test_a_compressed_file_is_read_in_any_order(tmp_path, packer, suffix, data):
    path = tmp_path / f"train.{suffix}.{packer}"
    path.write_bytes(PACKERS[packer](data[: len(data) // 2]) + PACKERS[packer](data[len(data) // 2 :]))
    source, bad = opened(path)
    assert not bad and [source[at].prompt for at in (49, 0, 17)] == ["q49", "q0", "q17"]
    assert opened(path)[0][3] == source[3] and source.where(3).endswith("4")


def test_a_name_does_not_say_whether_a_file_is_compressed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(LINES))
    (tmp_path / "b.jsonl.gz").write_bytes(LINES)
    assert [len(opened(tmp_path / name)[0]) for name in ("a.jsonl", "b.jsonl.gz")] == [50, 50]


def test_a_bad_row_of_a_compressed_file_is_named_by_its_line(tmp_path):
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "q"}\n\n{"prompt": 1}\n'))
    assert opened(path)[1] == {"3": "'prompt' is a number, not text or a list of messages"}
    result = CliRunner().invoke(app, ["data", "check", str(path)])
    assert result.exit_code == 2 and f"{path}:3" in result.stdout and "1 usable, 1 bad" in result.stdout


def test_relax_try_reads_compressed_rows(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "q", "response": "r"}\n'))
    assert [row.sample.response for row in _rows(path, "exact", (), "")] == ["r"]


def test_media_of_a_compressed_file_travel_in_their_tasks(tmp_path):
    image = base64.b64encode(b"i" * 9000).decode()
    row = {"prompt": "<image><image>", "images": [{"bytes": image}, f"data:image/png;base64,{image}"]}
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    assert [read_source(media.source) for media in media_of(opened(path)[0][0].prompt)] == [b"i" * 9000] * 2


REFUSED = {
    "cut.jsonl.gz": (gzip.compress(LINES)[:-9], "can't be unpacked"),
    "cut.jsonl.xz": (lzma.compress(LINES)[:-9], "can't be unpacked"),
    "cut.jsonl.bz2": (bz2.compress(LINES)[:-9], "can't be unpacked"),
    "damaged.jsonl.gz": (gzip.compress(LINES)[:12] + b"\xff" * 20, "can't be unpacked"),
    "a.jsonl.zst": (zstandard.compress(LINES), "compressed by zstd; unpack it"),
    "a.jsonl": (b"PAR1 and more", "a Parquet file; give it a name that ends in .parquet"),
    "a.parquet.gz": (gzip.compress(b"PAR1 and more"), "a Parquet file"),
    "a.json": (b"PK\x03\x04 and more", "a zip archive; unpack it"),
    "a.csv": (b"prompt,answer\nq,1\n", "which is not JSON; convert it to JSON lines"),
    "a.tsv.gz": (gzip.compress(b"prompt\tanswer\n"), "which is not JSON; convert it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_another_format_is_refused_with_what_to_do(tmp_path, name):
    content, reason = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Files().open(str(tmp_path / name), {})
    assert name in str(caught.value) and reason in str(caught.value)


# -- base64 text ------------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 2
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(range(256)) * 40
WAV = b"RIFF\x10\x00\x00\x00WAVEfmt " + bytes(60)
MP4 = b"\x00\x00\x00\x20ftypisom" + bytes(60)


def coded(data):
    return base64.b64encode(data).decode()


FORMS = {
    "text": coded,
    "a data-URI": lambda data: "data:image/png;base64," + coded(data),
    "lines": lambda data: base64.encodebytes(data).decode(),
    "a data-URI of lines": lambda data: "data:image/png;base64," + base64.encodebytes(data).decode(),
    "bytes": lambda data: {"bytes": coded(data)},
    "bytes of lines": lambda data: {"bytes": base64.encodebytes(data).decode(), "path": None},
    "bytes as a data-URI": lambda data: {"bytes": "data:image/png;base64," + coded(data)},
    "a field base64": lambda data: {"base64": coded(data)},
    "a data-URI in a field base64": lambda data: {"base64": "data:;base64," + coded(data)},
    "a field image": lambda data: {"image": coded(data)},
    "a URL": lambda data: {"url": "data:;base64," + coded(data)},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_base64_text_is_read_where_a_medium_is_expected(tmp_path, form, suffix):
    found = [PNG, JPEG, WAV, MP4]
    rows = [{"prompt": "<image>", "image": FORMS[form](data)} for data in found]
    path = tmp_path / f"tasks{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    source, bad = opened(path)
    assert not bad
    assert [read_source(media_of(travels(task).prompt)[0].source) for task in source] == found


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_base64_text_in_a_column_of_bytes_is_read(tmp_path, suffix):
    texts = [coded(PNG).encode(), b"data:image/png;base64," + coded(PNG).encode(), PNG]
    source, bad = opened(written(tmp_path / f"tasks{suffix}", {"prompt": ["<image>"] * 3, "image": texts}))
    assert not bad and [read_source(media_of(task.prompt)[0].source) for task in source] == [PNG] * 3


def test_a_path_is_not_base64_text(tmp_path):
    for name in ("UklGRdata.wav", "iVBORw0KGgo.png"):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "<image>", "image": name}))
        source = Files()
        with suppress(ConfigError):
            source.open(str(tmp_path / "tasks.jsonl"), {})
        assert read_source(media_of(source[0].prompt)[0].source) == b"x"


BROKEN = {
    "a list of numbers": (
        {"bytes": [137, 80]},
        "the bytes of the image at image are a list; write them as base64 text",
    ),
    "bytes": ({"bytes": "a!b"}, "the image at image: a data-URI whose base64 is broken"),
    "a data-URI": ("data:image/png;base64,a!b", "the image at image: a data-URI whose base64 is broken"),
    "a long data-URI": (
        "data:image/png;base64,a!b" + "A" * 9000,
        "the image at image: a data-URI whose base64 is broken",
    ),
    "a data-URI that was cut": ("data:image/png;base64,AAA", "whose base64 is broken"),
    "a data-URI without data": ("data:image/png;base64,", "the image at image has no bytes"),
    "a data-URI without a comma": ("data:image/png", "without a comma"),
    "a character beyond ASCII": ({"bytes": "\u00e4"}, "whose base64 is broken"),
    "no bytes": ({"bytes": ""}, "the image at image has no bytes"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("name", BROKEN)
def test_text_that_is_no_medium_is_refused_by_its_row(tmp_path, name, suffix):
    value, reason = BROKEN[name]
    row = {"prompt": "<image>", "image": value}
    (tmp_path / f"tasks{suffix}").write_text(json.dumps(row if suffix == ".jsonl" else [row]))
    (bad,) = opened(tmp_path / f"tasks{suffix}")[1].values()
    assert reason in bad
