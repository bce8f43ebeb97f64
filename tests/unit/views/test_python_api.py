# SPDX-License-Identifier: Apache-2.0
"""Tasks passed from Python become files of the runs folder, which a resumed run reads again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from relax_core.api.errors import ConfigError
from relax_core.notebook import _data

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "answer": "4"},
    {"prompt": [{"role": "user", "content": "1+1?"}], "answer": 2},
]


class Frame:
    """A table that writes Parquet by the method that data frames and `datasets.Dataset` have."""

    def to_parquet(self, path: str) -> None:
        pyarrow.parquet.write_table(pa.table({"prompt": ["2+2?"], "answer": ["4"]}), path)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAX_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_rows_are_written_once_and_named_by_their_content(runs: Path) -> None:
    def streamed() -> Iterator[dict[str, Any]]:
        yield from ROWS

    ((layer,), (again,)) = _data(ROWS, None), _data(streamed(), None)
    assert layer == again
    file = Path(layer["data"]["train"])
    assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    assert list((runs / "tasks").iterdir()) == [file]
    (other,) = _data(ROWS[:1], None)
    assert other != layer


def test_a_table_stays_a_table_and_a_path_stays_a_path() -> None:
    data, evaluation = _data("tasks.jsonl", {"hard": Frame(), "easy": Path("easy.jsonl")})
    assert data == {"data": {"train": "tasks.jsonl"}}
    hard, easy = evaluation["eval"]["sets"]
    assert easy == {"name": "easy", "path": "easy.jsonl"} and hard["name"] == "hard"
    assert pyarrow.parquet.read_table(hard["path"]).to_pylist() == [{"prompt": "2+2?", "answer": "4"}]
    assert _data(None, ROWS)[0]["eval"]["sets"][0]["name"] == "eval"


@pytest.mark.parametrize(
    ("row", "got"),
    [("2+2?", "got str"), ({"prompt": object()}, "not JSON serializable"), ({"x": float("nan")}, "not JSON compliant")],
)
def test_a_row_that_no_file_can_hold_is_refused_with_its_number(runs: Path, row: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks, row 1: .*give rows such as") as caught:
        _data([ROWS[0], row], None)
    assert got in str(caught.value)
    assert list((runs / "tasks").iterdir()) == []
