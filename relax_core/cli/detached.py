# SPDX-License-Identifier: Apache-2.0
"""The start of a run that outlives its terminal: `relax train --detach` and `relax resume --detach`, and both on Ray.

The supervisor and the run's process inherit neither the terminal nor a pipe. They write to two unnamed temporary files,
and this command copies their content to the terminal until the run has started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import typer

from relax_core.cli.terminal import Interrupted, asking, print_json, say

POLL_S = 0.1


@asking()
def start_detached(verb: str, as_json: bool) -> Path:
    """Start this command again under a supervisor, and return the run directory once the run has started.

    Ctrl-C before that stops the run; closing the terminal does not. If the run does not start, this command ends with
    the run's error and exit code.
    """
    from relax_core.control.supervisor import reported

    words = [word for word in sys.argv[sys.argv.index(verb) :] if word != "--detach"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "relax_core.control.supervisor", *words], stdin=subprocess.DEVNULL, stdout=out,
            stderr=errors, start_new_session=True,
        )  # fmt: skip
        said, console = Relay(errors.fileno()), None
        report: dict[str, Any] = {}
        while not _has_started(report):
            try:
                code = supervisor.poll()
                said.pass_on()
                if not report and (report := reported(out.fileno())):
                    console = Relay(os.open(report["console"], os.O_RDONLY), report["console_from"])
                if console is not None:
                    console.pass_on()
                if code is not None and not _has_started(report):
                    _end_failed(code, out.fileno(), as_json)
                time.sleep(POLL_S)
            except Interrupted as interrupted:
                if interrupted.number == signal.SIGHUP:  # the terminal was closed; the run continues
                    raise
                supervisor.send_signal(signal.SIGINT)
        if console is not None:
            console.pass_on()
        supervisor.returncode = 0  # Popen then does not track the supervisor, which keeps running
    run_dir = Path(report["run_dir"])
    if as_json:
        print_json({key: report[key] for key in ("schema", "run_dir", "pid")})
        return run_dir
    named = run_dir.name if run_dir.parent == (Path(os.environ.get("RELAX_RUNS") or "runs")).resolve() else run_dir
    say(f"run:   {run_dir}\nwatch: relax attach {named}\nstop:  relax stop {named}")
    return run_dir


class Relay:
    """A reader that copies to stderr the text that another process appends to a file."""

    def __init__(self, file: int, begin: int = 0) -> None:
        self._file, self._at = file, begin

    def pass_on(self) -> None:
        """Copy the text that was added since the last call."""
        while text := os.pread(self._file, 1 << 16, self._at):
            self._at += len(text)
            say(text.decode(errors="replace"), err=True, nl=False)


def _has_started(report: dict[str, Any]) -> bool:
    """Return True if the run's status, written since this start, says `running` or `finished`."""
    if not report:
        return False
    from relax_core.observe.files import read_document

    status = read_document(Path(report["run_dir"]) / "status.json") or {}
    return float(status.get("written_at", 0.0)) >= report["at"] and status.get("state") in ("running", "finished")


def _end_failed(code: int, output: int, as_json: bool) -> None:
    """Exit with the code of a run that did not start; with `as_json`, first print the run's JSON document."""
    printed = os.pread(output, 1 << 20, 0).decode(errors="replace").splitlines()
    if as_json and printed and printed[-1].startswith("{"):
        say(json.dumps(json.loads(printed[-1])))
    raise typer.Exit(code)
