# SPDX-License-Identifier: Apache-2.0
"""Sinks work in a process of their own: what it receives, what its errors say, and how it ends."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from relax_core.api.component import Chosen
from relax_core.api.errors import InfrastructureError, PluginError, RelaxError
from relax_core.api.events import Sink, Span
from relax_core.control import sink_process
from relax_core.control.sink_process import sinks_apart
from relax_core.observe.redaction import Redactor
from relax_core.registry.catalogue import Catalogue

pytestmark = pytest.mark.process

SINKS = """
import atexit, json, os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from relax_core.api import Options, Sink

class Where(Options):
    path: str

class Writes(Sink[Where]):
    def _write(self, *call):
        with open(self.options.path, "a") as file:
            file.write(json.dumps([*call, type(call[-1]).__name__, os.getpid()]) + "\\n")
    def open(self, run_dir, name, config):
        atexit.register(self._write, "program ends")
        with ThreadPoolExecutor(1) as pool:  # refused by a program that ends
            pool.submit(self._write, "open", run_dir, name, config).result()
    def metrics(self, step, values):
        if step == 13:
            raise SystemExit("unlucky")
        if step == 14:
            os._exit(14)
        self._write("metrics", step, values)
    def samples(self, step, samples):
        self._write("samples", step, samples)
    def close(self):
        self._write("close")

class Traces(Writes):
    def rewind(self, step, last):
        self._write("rewind", step, last)
    def spans(self, step, spans):
        self._write("spans", step, [span.name for span in spans])
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        sink_process, "END_S", 600.0
    )  # how long a busy machine takes to end the child is no matter here
    (tmp_path / "sinks_of_tests.py").write_text(SINKS)
    return tmp_path / "sinks_of_tests.py"


def started(program: Path, *names: str, files: tuple[str, ...] = ()) -> AbstractContextManager[dict[str, Sink]]:
    """Start sinks of the program; the child loads `files` in its place, if they are given."""
    folder = program.parent
    chosen = [Chosen("sink", name, {"path": str(folder / f"{name}.jsonl")}) for name in names]
    return sinks_apart(
        chosen, Catalogue.load([str(program)]), files or (str(program),), folder / "logs", Redactor(), "a-run"
    )


def calls(program: Path, name: str) -> list[list[Any]]:
    return [json.loads(line) for line in (program.parent / f"{name}.jsonl").read_text().splitlines()]


def test_sinks_receive_in_one_other_process_what_the_run_sends_and_end_as_a_program_does(program: Path) -> None:
    sample = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2"}]}],
        "reward": 1.0,
        "outcome": None,
    }
    with started(program, "writes", "traces") as sinks:
        assert [type(sink).spans is Sink.spans for sink in sinks.values()] == [True, False]
        for sink in sinks.values():
            sink.open("/runs/a", "a", {"steps": 2, "eval": {"sets": ["held-out"]}})
            sink.metrics(1, {"loss": 0.5})
            sink.samples(1, [sample])
            sink.spans(1, [Span("steps", "work", "step 1", 0.0, 1.0)])
            sink.rewind(0, 1)
            sink.close()
    written, traced = calls(program, "writes"), calls(program, "traces")
    assert [call[:-2] for call in written] == [
        ["open", "/runs/a", "a", {"steps": 2, "eval": {"sets": ["held-out"]}}],
        ["metrics", 1, {"loss": 0.5}],
        ["samples", 1, [sample]],
        ["metrics", 0, {"run/undone_steps": 1.0}],
        ["close"],
        ["program ends"],
    ]
    assert [call[:-2] for call in traced if call[0] == "spans"] == [["spans", 1, ["step 1"]]]
    assert [call[:-2] for call in traced if call[0] == "rewind"] == [["rewind", 0, 1]]
    (process,) = {call[-1] for call in (*written, *traced)}
    assert process != os.getpid()


def test_a_sink_goes_on_after_an_exception_and_the_end_of_the_process_names_its_log(program: Path) -> None:
    with started(program, "writes", "traces") as sinks:
        with pytest.raises(PluginError, match="sink writes: SystemExit: unlucky") as caught:
            sinks["writes"].metrics(13, {})
        assert 'raise SystemExit("unlucky")' in caught.value.__notes__[0]
        sinks["writes"].metrics(1, {})
        for name, step in (("writes", 14), ("writes", 1), ("traces", 1)):
            with pytest.raises(
                InfrastructureError, match=r"the process of the sinks has ended; its log is logs/sinks\.log"
            ):
                sinks[name].metrics(step, {})
    assert [call[:2] for call in calls(program, "writes")] == [["metrics", 1]]
    assert (program.parent / "logs" / "sinks.log").exists()


def test_each_call_to_a_sink_that_the_process_cannot_build_says_why(program: Path) -> None:
    with (
        started(program, "writes", files=("no_such_file.py",)) as sinks,
        pytest.raises(RelaxError, match="no_such_file"),
    ):
        sinks["writes"].open("/runs/a", "a", {})


def test_a_run_without_sinks_starts_no_process(program: Path) -> None:
    with started(program) as sinks:
        assert sinks == {}
    assert not (program.parent / "logs").exists()
