# SPDX-License-Identifier: Apache-2.0
"""Who waits for what, told at a later time than it was written."""

import os
import subprocess
import sys

from relax_core.api.status import Beat, Wait
from relax_core.observe.run_directory import RunDirectory
from relax_core.observe.status import status_document
from relax_core.views.health import Health, health
from relax_core.views.run import RunView
from relax_core.views.why import why

RUNNING = Health("running")


def wait(owner, reason, owed_by, since, deadline):
    return Wait(owner, reason, owed_by, since, deadline)


def status(*beats, state="running"):
    return status_document(beats, 100.0, 5000.0, {"state": state, "step": 7, "steps": 20})


def test_a_wait_says_who_owes_it_since_when_and_until_when():
    said = status(
        Beat("actor", "waiting", waits=(wait("actor", "8 groups", "rollout", 90.0, 150.0),)),
        Beat("rollout", "busy", doing="generating 24 samples"),
    )
    answer = why(said, RUNNING, 5002.0)
    assert list(answer.lines()) == [
        "running, step 7 of 20; 1 wait",
        "  actor waits for 8 groups, owed by rollout: 12.0 s so far, 48.0 s left",
        "  rollout is busy: generating 24 samples",
    ]


def test_a_deadline_that_passed_is_said_and_the_longest_wait_comes_first():
    said = status(
        Beat("rollout", "waiting", waits=(wait("engine-1", "weights policy@0.7", "actor", 99.0, 400.0),)),
        Beat("actor", "waiting", waits=(wait("actor", "8 groups", "reward", 10.0, 98.0),)),
    )
    first, second = why(said, RUNNING, 5000.0).waits
    assert "its deadline passed 2.0 s ago" in first.sentence()
    assert second.sentence().startswith("rollout (engine-1) waits for weights policy@0.7, owed by actor: 1.0 s")


def test_roles_that_wait_for_each_other_are_a_ring():
    said = status(
        Beat("actor", "waiting", waits=(wait("actor", "rows", "advantages", 90.0, 150.0),)),
        Beat("advantages", "waiting", waits=(wait("advantages", "rows", "rollout", 90.0, 150.0),)),
        Beat("rollout", "waiting", waits=(wait("rollout", "a grant", "actor", 90.0, 150.0),)),
    )
    answer = why(said, RUNNING, 5000.0)
    assert set(answer.ring) == {"actor", "advantages", "rollout"}
    assert "nobody can move: " in list(answer.lines())[1]


def test_a_busy_role_breaks_the_ring():
    said = status(
        Beat("actor", "waiting", waits=(wait("actor", "rows", "rollout", 90.0, 150.0),)),
        Beat("rollout", "busy", waits=(wait("engine-0", "a grant", "actor", 90.0, 150.0),)),
    )
    assert why(said, RUNNING, 5000.0).ring == ()


def run_saying(tmp_path, said):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text("")
    run = RunDirectory.open(path)
    if said is not None:
        run.write("status", said)
    return RunView(path)


def answer(tmp_path, said, wall):
    run = run_saying(tmp_path, said)
    state = health(run, wall)
    return state.state, why(run.status(), state, wall).headline


def test_an_ended_run_waits_for_nothing(tmp_path):
    said = status(Beat("actor", "waiting", waits=(wait("actor", "x", "y", 0, 1),)), state="stopped")
    assert answer(tmp_path, said, 9e9) == ("stopped", "the run has ended: stopped after step 7")


def test_a_status_whose_process_is_gone_is_stale(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=30)
    state, headline = answer(tmp_path, status() | {"pid": gone.pid}, 5004.0)
    assert state == "lost"
    assert headline.startswith("this is stale: the run last spoke 4.0 s ago at step 7 of 20; its process")
    assert "relax resume run" in headline


def test_a_status_that_is_old_is_stale(tmp_path):
    state, headline = answer(tmp_path, status() | {"pid": os.getpid()}, 5400.0)
    assert state == "silent" and "6 min 40 s ago" in headline


def test_another_machines_process_id_means_nothing_here(tmp_path):
    said = status() | {"host": "elsewhere", "pid": 2**22 + 1}
    assert answer(tmp_path, said, 5004.0)[0] == "running"


def test_a_run_that_has_said_nothing_is_starting(tmp_path):
    assert answer(tmp_path, None, 0.0) == ("starting", "starting: it has said nothing yet")
