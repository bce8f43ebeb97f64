# SPDX-License-Identifier: Apache-2.0
"""The Slurm script with programs of this test in the place of Slurm, Ray and relax: order, arguments, signals, exit codes.

Each program appends its words to a log. `srun` blocks like a Ray node, and `ray health-check` succeeds once the head's
`srun` has begun, so the order of the log is the order that the script enforces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_contrib.deploy.__main__ import HERE

SCRIPT = HERE / "slurm.sh"
DEADLINE_S = 120.0
PROGRAMS = {
    "scontrol": 'case $1 in show) printf "%s\\n" $NODES ;; *) echo "scontrol $*" >>"$LOG" ;; esac',
    "getent": '[ -n "$IP" ] || exit 2\necho "$IP STREAM $2"',
    "srun": '[ -z "$NO_HEAD" ] || exit 1\necho "srun $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*" >>"$LOG"\nexec /bin/sleep 3600',
    "sleep": "exec /bin/sleep 0.02",  # the script's pause between two looks at the head
    "ray": 'grep -q "^srun .*--head" "$LOG" || exit 1\necho "ray $*" >>"$LOG"',
    "relax": 'until [ "$(grep -c ^srun "$LOG")" = $STEPS ]; do /bin/sleep 0.02; done\n'
    'echo "relax $RAY_ADDRESS $*" >>"$LOG"\n'
    '[ -n "$SAVES" ] || exit "$CODE"\n'
    "trap 'echo relax: SIGTERM >>\"$LOG\"; told=1' TERM\n"
    'touch "$LOG.ready"\n'
    'until [ -n "$told" ] && [ -e "$LOG.save" ]; do /bin/sleep 0.02; done\n'
    'echo "relax: saved" >>"$LOG"; exit "$CODE"',
}


class Job:
    """One run of the script, in a folder that has the log of the programs."""

    def __init__(self, folder: Path, *words: str, nodes: str = "n1 n2 n3", **env: str) -> None:
        programs, self.log = folder / "bin", folder / "log"
        programs.mkdir()
        self.log.touch()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "32"}
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(self.log), "NODES": nodes}
        expected = {"STEPS": "1" if nodes == "n1" else "2", "IP": "10.0.0.1", "CODE": "0", "SAVES": "", "NO_HEAD": ""}
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), *words], env=slurm | path | expected | env,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def end(self) -> tuple[int, str, list[str]]:
        """Wait for the end of the script; return its exit code, its errors and the log."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors, self.log.read_text().splitlines()

    def alive(self) -> bool:
        """Return True if a process that the script started is still alive."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs to kill after the test, if it fails before their end."""
    started: list[Job] = []
    yield started
    for job in started:
        if job.alive():
            os.killpg(job.process.pid, signal.SIGKILL)


def test_the_head_starts_before_the_other_nodes_and_relax_joins_their_cluster(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "/shared/run", "my.toml", "run.name=two words", SLURM_GPUS_ON_NODE="8"))
    code, errors, log = job.end()
    assert (code, errors) == (0, "")
    head, health, *both = log
    others, relax = sorted(both, reverse=True)  # they start side by side
    resources = "--overlap --mem=0 --cpu-bind=none --cpus-per-task=32 --kill-on-bad-exit=0"
    ray = "ray start --block --num-gpus=8 --object-store-memory=536870912"
    assert head == (
        f"srun token 64 --nodes=1 --ntasks=1 --nodelist=n1 {resources} {ray} --head --node-ip-address=10.0.0.1 "
        "--port=22345 --include-dashboard=false --temp-dir=/tmp/ray-12345"
    )
    assert health == "ray health-check --address 10.0.0.1:22345"
    assert others == f"srun token 64 --nodes=2 --ntasks=2 --exclude=n1 {resources} {ray} --address=10.0.0.1:22345"
    assert relax == (
        "relax 10.0.0.1:22345 train my.toml run.name=two words --runner ray --run-dir /shared/run --resume"
    )
    assert not job.alive(), "the script ends the job steps"


def test_one_node_needs_no_second_step_and_the_runs_exit_code_is_the_jobs(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "/shared/run", "my.toml", nodes="n1", CODE="5"))
    code, _, log = job.end()
    assert code == 5
    assert [line.split()[0] for line in log] == ["srun", "ray", "relax"] and "--num-gpus=0" in log[0]


def test_a_run_that_a_person_stopped_is_not_queued_again(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "/shared/run", "my.toml", nodes="n1", CODE="130"))
    code, _, log = job.end()
    assert code == 130 and not any(line.startswith("scontrol") for line in log)


@pytest.mark.parametrize(("ending", "queued"), [("130", True), ("0", False), ("1", False)])
def test_after_sigterm_the_run_saves_once_before_the_job_is_queued_again(
    tmp_path: Path, jobs: list[Job], ending: str, queued: bool
) -> None:
    jobs.append(job := Job(tmp_path, "/shared/run", "my.toml", nodes="n1", CODE=ending, SAVES="1"))
    job.wait_for(Path(f"{job.log}.ready"))
    for _ in range(2):  # the second signal must not reach relax, where it would end the run without a checkpoint
        job.process.send_signal(signal.SIGTERM)
    Path(f"{job.log}.save").touch()
    code, errors, log = job.end()
    assert code == int(ending), errors
    assert log[3:] == ["relax: SIGTERM", "relax: saved", *(["scontrol requeue 12345"] if queued else [])]
    assert not job.alive()


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        ((), {}, 1, ["usage: sbatch [options] slurm.sh RUN_DIR WORD..."]),
        (("/shared/run", "my.toml"), {"IP": "127.0.1.1"}, 2, ["n1 resolves to '127.0.1.1'", "set RELAX_HEAD_ADDRESS"]),
        (("/shared/run", "my.toml"), {"IP": ""}, 2, ["n1 resolves to ''", "set RELAX_HEAD_ADDRESS"]),
        (("/shared/run", "my.toml"), {"NO_HEAD": "1"}, 4, ["Ray did not start on n1 (10.0.0.1:22345)"]),
    ],
)  # fmt: skip
def test_what_prevents_a_start_is_named(
    tmp_path: Path, jobs: list[Job], words: tuple[str, ...], env: dict[str, str], code: int, said: list[str]
) -> None:
    jobs.append(job := Job(tmp_path, *words, **env))
    ended, errors, log = job.end()
    assert ended == code and all(text in errors for text in said), errors
    assert not any(line.startswith("relax") for line in log)


def test_the_address_of_the_head_can_be_named(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(
        job := Job(tmp_path, "/shared/run", "x.toml", nodes="n1", IP="127.0.1.1", RELAX_HEAD_ADDRESS="10.9.9.9")
    )
    code, _, log = job.end()
    assert code == 0 and log[1] == "ray health-check --address 10.9.9.9:22345"
