# SPDX-License-Identifier: Apache-2.0
"""Tasks passed from Python become files of the runs folder; an interrupted cell of a notebook ends its run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from relax_core.api.errors import ConfigError
from relax_core.notebook import _data, _in_thread, _obey_caller, bundle, evaluate
from relax_core.observe.console import run_to_end

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


def test_an_interrupt_of_the_caller_cancels_a_call_and_is_raised_after_its_end() -> None:
    ended: list[str] = []

    async def evaluate() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("processes")

    with pytest.raises(KeyboardInterrupt):
        _in_thread(lambda: run_to_end(evaluate()))
    assert ended == ["processes"]


def test_each_interrupt_of_the_caller_reaches_the_run() -> None:
    async def train() -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()

        def receive(number: signal.Signals) -> bool:
            loop.call_soon_threadsafe(arrived.put_nowait, number)
            return True

        with _obey_caller(receive):
            for _ in range(2):  # the first stops the run with a checkpoint, the second ends the run at once
                os.kill(os.getpid(), signal.SIGINT)
                assert await arrived.get() is signal.SIGINT

    with pytest.raises(KeyboardInterrupt):
        _in_thread(lambda: asyncio.run(train()))
    assert _in_thread(lambda: "result") == "result"


def test_a_bundle_without_its_plugin_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_DISABLE_PLUGINS", "relax-plugin-report")
    with pytest.raises(ConfigError, match=r"'bundle'.*relax-plugin-report .*was skipped"):
        bundle("some-run")


def test_a_command_that_its_plugin_does_not_offer_to_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.notebook.PYTHON", "relax.absent")
    with pytest.raises(ConfigError, match=r"'eval'.*relax-plugin-workbench offers it only as `relax eval`"):
        evaluate("some-run")
