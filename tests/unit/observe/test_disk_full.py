# SPDX-License-Identifier: Apache-2.0
"""A disk that is really full: one clear error, and everything written before it stays readable."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.api.errors import disk_error
from relax_core.control.stages import resumable_step
from relax_core.observe.run_directory import RunDirectory

FILL = """
import sys
from datetime import datetime
from pathlib import Path
from random import Random
from relax_core.api.errors import InfrastructureError
from relax_core.api.events import RunStarted, SamplesScored, StepFinished
from relax_core.observe.recorder import Recorder
from relax_core.api.errors import disk_error
from relax_core.control.stages import resumable_step
from relax_core.observe.run_directory import RunDirectory

random = Random(1)
run = RunDirectory.create(Path(sys.argv[1]), "x", datetime(2026, 11, 20), random)
run.write_config("steps = 100000\\n")
try:
    with Recorder(run) as recorder:
        recorder.write(RunStarted("x", sys.argv[1], {}))
        for step in range(1, 100001):
            text = random.randbytes(2000).hex()
            recorder.write(SamplesScored(step, ({"response": text},)))
            recorder.write(StepFinished(step, {f"a/{i}": random.random() for i in range(100)}))
except InfrastructureError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def fill(folder, **more):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", FILL, str(folder / "run")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False, **more)


def check(done, run_dir):
    assert done.returncode == 4, done.stderr
    assert str(run_dir) in done.stdout and "no space left" in done.stdout
    assert f"--run-dir {run_dir} --resume`, because the run has no checkpoint" in done.stdout, "which resume refuses"
    run = RunDirectory.open(run_dir)
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5
    assert all(len(list(run.samples(step))) == 1 for step in steps)
    assert not list(run_dir.glob(".*.json.*"))
    return run


@pytest.fixture
def small_disk(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system can't be mounted here; the limit on file size below stands in")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_ends_the_run_with_its_summary_written(small_disk):
    run = check(fill(small_disk), small_disk / "run")
    summary = run.read("summary")
    assert summary["status"] == "failed" and "no space left" in summary["error"]
    assert summary["steps"] == len(list(run.metrics()))


def limited():
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_file_that_may_not_grow_is_the_same_error(tmp_path):
    run = check(fill(tmp_path, preexec_fn=limited), tmp_path / "run")
    assert "metrics.jsonl" in run.read("summary")["error"]
    assert Path(run.path / "metrics.jsonl").stat().st_size <= 100_000


def test_a_full_disk_advises_what_continues_the_run(tmp_path):
    full, run = OSError(errno.ENOSPC, "full"), tmp_path / "run"
    assert "free some, then run the command again" in str(disk_error(tmp_path / "run.bundle.tar.gz", full))
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "config.toml").touch()
    for path in (run / "metrics.jsonl", run / "checkpoints" / ".partial" / "files.json"):
        assert f"repeat the command with `--run-dir {run} --resume`" in str(disk_error(path, full))
        assert resumable_step(run) is None, "resume would be refused"
    (run / "checkpoints" / "step-000002" / "state.json").touch()
    assert (
        f"free some, then `relax resume {run}`" in str(disk_error(run / "metrics.jsonl", full))
        and resumable_step(run) == 2
    )
    stage = tmp_path / "staged" / "stages" / "0-first"
    for folder in (stage, tmp_path / "staged"):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.toml").touch()
    assert f"`relax resume {tmp_path / 'staged'}`" in str(disk_error(stage / "metrics.jsonl", full))
