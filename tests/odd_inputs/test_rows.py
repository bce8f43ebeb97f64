# SPDX-License-Identifier: Apache-2.0
"""Every row of a task file becomes plain data that can travel, or a bad row with its line; unread columns never matter."""

import json
from contextlib import suppress
from datetime import date
from decimal import Decimal
from pathlib import Path
from struct import pack

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from relax_plugin_workbench.try_run import _rows

from relax_core.api import ConfigError, Task, TaskSource
from relax_core.data.plain_data import NotPlainError, plain
from relax_core.data.task_files import Files, TableSourceOptions
from relax_core.data.tasks import TaskSet
from relax_core.rpc.messages import decode, encode

CASES = [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_bytes().split(b"\n") if line]
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(pack("<iii", 0, 1, 3)), pa.py_buffer(b"a\xff\xfe")]
)
NESTED_NOT_UTF8 = pa.StructArray.from_arrays([NOT_UTF8], names=["text"])
TWICE = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
SCALARS = {
    "timestamp": (pa.array([1, 2], pa.timestamp("us")), "1970-01-01T00:00:00.000001"),
    "timestamp of nanoseconds": (pa.array([1, 2], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
    "timestamp with a zone": (pa.array([0, 1], pa.timestamp("s", "UTC")), "1970-01-01T00:00:00+00:00"),
    "timestamp with an unknown zone": (pa.array([0, 1], pa.timestamp("s", "Nowhere/X")), None),
    "timestamp beyond the years": (pa.array([2**60, 1], pa.timestamp("s")), None),
    "date": (pa.array([1, 2], pa.date32()), "1970-01-02"),
    "date of milliseconds": (pa.array([0, 86400000], pa.date64()), "1970-01-01"),
    "date beyond the years": (pa.array([2**30, 1], pa.date32()), None),
    "time": (pa.array([1, 2], pa.time32("s")), "00:00:01"),
    "time of nanoseconds": (pa.array([1, 2], pa.time64("ns")), "00:00:00.000000001"),
    "duration": (pa.array([1500, 2], pa.duration("ms")), 1.5),
    "duration of nanoseconds": (pa.array([1, 2], pa.duration("ns")), 1e-9),
    "duration beyond the range": (pa.array([2**60, 2], pa.duration("s")), 2.0**60),
    "interval": (pa.array([(1, 2, 3), (1, 2, 3)], pa.month_day_nano_interval()), [1, 2, 3]),
    "decimal of a whole number": (pa.array([Decimal("42.00"), Decimal(1)], pa.decimal128(10, 2)), 42),
    "decimal": (pa.array([Decimal("0.10"), Decimal(1)], pa.decimal128(10, 2)), 0.1),
    "decimal of many digits": (
        pa.array([Decimal("0.12345678901234567890"), Decimal(1)], pa.decimal128(30, 20)), "0.12345678901234567890",
    ),
    "half": (pa.array(np.array([1.5, 2], np.float16)), 1.5),
    "large text": (pa.array(["a", "b"], pa.large_string()), "a"),
    "text view": (pa.array(["a", "b"], pa.string_view()), "a"),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), "a"),
    "null": (pa.nulls(2), None),
    "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), [["a", 1]]),
    "list of structs": (pa.array([[{"a": 1, "b": None}], []]), [{"a": 1, "b": None}]),
    "large list": (pa.array([[1], []], pa.large_list(pa.int64())), [1]),
    "list of fixed size": (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), [1, 2]),
    "struct of timestamps": (
        pa.array([{"a": 1}, {"a": 2}], pa.struct([("a", pa.timestamp("ns"))])), {"a": "1970-01-01T00:00:00.000000001"},
    ),
    "NaN": (pa.array([float("nan"), 1.0]), None),
    "binary": (pa.array([b"a", b"b"]), None),
    "binary of fixed size": (pa.array([b"a", b"b"], pa.binary(1)), None),
    "large binary": (pa.array([b"a", b"b"], pa.large_binary()), None),
    "uuid": (pa.array([b"0" * 16, b"1" * 16], pa.uuid()), "30303030-3030-3030-3030-303030303030"),
    "text that is not UTF-8": (NOT_UTF8, "a"),
    "nested text that is not UTF-8": (NESTED_NOT_UTF8, ...),
    "a struct with a name twice": (TWICE, None),
}  # fmt: skip
"""Name -> (column of two rows, its plain value in the first row; `...`: it depends on the format of the file)."""


def opened(path, columns=None):
    """Open a file; return (source, {row or line: reason of a bad row})."""
    source = Files(TableSourceOptions())
    with suppress(ConfigError):
        source.open(str(path), columns or {})
    return source, {bad.where.removeprefix(str(path)).strip(": "): bad.reason for bad in source.problems()}


def travels(task):
    """Return a task after a journey between processes, having shown that it can be written as JSON in UTF-8."""
    json.dumps([task.id, str(task.prompt), task.answer, dict(task.metadata)], ensure_ascii=False).encode()
    return decode(encode(task))


def same(found, expected):
    return found == expected and type(found) is type(expected)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_line_is_a_good_row_or_a_bad_row_with_its_line(tmp_path, case):
    path, line = tmp_path / "tasks.jsonl", case["line"]
    for mark, (text, count) in case.get("repeat", {}).items():
        line = line.replace(mark, text * count)
    path.write_bytes(b"\n".join([b'{"prompt": "first"}', line.encode(), b'{"prompt": "last"}', b""]))
    source, bad = opened(path)
    tasks = [travels(source[index]) for index in range(len(source))]
    assert [tasks[0].prompt, tasks[-1].prompt] == ["first", "last"]
    if case["outcome"] == "bad":
        assert list(bad) == ["2"] and case["reason"] in bad["2"]
    elif case["outcome"] == "good":
        assert not bad and len(tasks) == 3
        found = {"prompt": tasks[1].prompt, "answer": tasks[1].answer, **tasks[1].metadata}
        assert {name: found[name] for name in case["values"]} == case["values"]
    said = list(source.remarks())
    assert (
        [case["remark"] in one and " has 1 values that tasks can't hold, the first at" in one for one in said] == [True]
        if "remark" in case
        else not said
    )


def written(path, columns):
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


NOT_IN_PARQUET = ("timestamp beyond the years", "interval")
"""Columns that Parquet cannot hold."""


@pytest.mark.parametrize(
    ("name", "suffix"),
    [(name, ".arrow") for name in SCALARS] + [(name, ".parquet") for name in SCALARS if name not in NOT_IN_PARQUET],
)
def test_any_arrow_scalar_becomes_plain_data_or_a_refused_row(tmp_path, name, suffix):
    column, expected = SCALARS[name]
    table = {"prompt": ["q", "r"], "thing": column}
    path = written(tmp_path / f"tasks{suffix}", table)
    source, bad = opened(path)
    assert not bad and len(source) == 2  # an unread column never matters
    found = [travels(source[index]).metadata["thing"] for index in range(2)]
    assert expected is ... or same(found[0], expected)
    source, bad = opened(path, {"answer": "thing"})
    for index in range(len(source)):
        travels(source[index])
    assert len(source) + len(bad) == 2 and all(where.startswith("row ") for where in bad)
    if expected is not None and expected is not ...:
        assert "row 1" not in bad


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_prompt_that_is_not_utf8_is_refused_by_its_row_alone(tmp_path, suffix):
    source, bad = opened(written(tmp_path / f"tasks{suffix}", {"prompt": NOT_UTF8}))
    assert [task.prompt for task in (source[0],)] == ["a"]
    assert list(bad) == ["row 2"] and "'prompt' can't be read" in bad["row 2"]


def test_bytes_are_not_an_answer(tmp_path):
    _, bad = opened(written(tmp_path / "tasks.parquet", {"prompt": ["q"], "answer": pa.array([b"a"])}))
    assert "'answer' holds bytes" in bad["row 1"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a"),
        (np.arange(3), [0, 1, 2]), (np.array([["a"]]), [["a"]]), ((1, (2,)), [1, [2]]), ({"a": np.float64(2)}, {"a": 2.0}),
        (np.datetime64("2024-01-02"), "2024-01-02"), (10**400, 10**400),
    ],
)  # fmt: skip
def test_values_of_other_sources_become_plain(value, expected):
    assert same(plain(value), expected)
    assert decode(encode({"value": plain(value)})) == {"value": expected}


@pytest.mark.parametrize("value", [{1: 2}, object(), [set()], "\ud800", {"a": {"\udfff": 1}}, 1j])
def test_a_value_without_a_plain_form_is_refused(value):
    with pytest.raises(NotPlainError):
        plain(value)


class Made(TaskSource):
    """A source that is not a file, with one task."""

    def __init__(self, task):
        self.task = task

    def open(self, path, columns): ...

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.task


class Family:
    placeholders, foreign_tokens = {}, {}


def test_a_task_of_another_source_travels_as_it_is_or_as_plain_data():
    given = Task("t", "q", frozenset({1}), {"array": np.arange(2), "pair": (1, 2)})
    assert TaskSet(Made(given), Family())[0] is given
    odd = TaskSet(Made(Task("t", "q", Decimal(2), {"day": date(2024, 1, 2)})), Family())[0]
    assert travels(odd).answer == 2 and odd.metadata == {"day": "2024-01-02"}


@pytest.mark.parametrize(
    "task", [Task("t", "\ud83d"), Task("t", "q", object()), Task("t", "q", metadata={"a": "\udfff"})]
)
def test_a_task_of_another_source_that_cannot_travel_is_refused_by_its_id(task):
    with pytest.raises(ConfigError, match=r"source: got task t, which can't be sent"):
        TaskSet(Made(task), Family())[0]


def test_a_renamed_column_that_no_row_has_is_a_fault_of_the_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "q", "solution": 1}\n{"prompt": "r"}\n')
    assert not opened(path, {"answer": "solution"})[1]
    (reason,) = opened(path, {"answer": "solved"})[1].values()
    assert reason == "no row has the column 'solved', which `columns` names for 'answer'"


def test_lines_of_json_end_at_line_feeds_alone_in_relax_try(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "a\u2028b", "response": "c\u0085d"}\r\n\n{"prompt": "q", "response": "r"}'.encode())
    assert [(row.task.prompt, row.sample.response) for row in _rows(path, "exact", (), "")] == [
        ("a\u2028b", "c\u0085d"),
        ("q", "r"),
    ]


BAD_LINES = (
    b'{"prompt": [{}], "response": "r"}', b'{"prompt": "\\ud83d", "response": "r"}', b"[]", b"\xff", b"[" * 100000,
    b'{"prompt": "q", "response": 1}', b'{"prompt": 5, "response": "r"}',
)  # fmt: skip


@pytest.mark.parametrize("row", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_row_of_relax_try_is_named_by_its_line(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "q", "response": "r"}\n' + row)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2"):
        list(_rows(path, "exact", (), ""))
