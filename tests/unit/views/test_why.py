# SPDX-License-Identifier: Apache-2.0
"""Who waits for what, told at a later time than it was written."""

import os
import subprocess

import pytest

from relax_core.api.role import Heartbeat, Wait
from relax_core.observe.run_directory import RunDirectory
from relax_core.observe.status import status_document
from relax_core.views.run import RunHealth, RunView, health, pause_reason
from relax_core.views.why import why

RUNNING = RunHealth("running")


def waiting(role, reason, blocked_by, since=90.0, deadline=150.0):
    """Make the heartbeat of a role that waits."""
    return Heartbeat(role, "waiting", waits=(Wait(role, reason, blocked_by, since, deadline),))


def status(*beats, state="running"):
    return status_document(beats, 100.0, 5000.0, {"state": state, "step": 7, "steps": 20})


def test_a_wait_is_shown_with_its_blocker_age_and_deadline():
    said = status(
        waiting("actor", "8 groups", "rollout"),
        Heartbeat("rollout", "busy", doing="generating 24 samples"),
    )
    answer = why(said, RUNNING, 5002.0)
    assert list(answer.lines()) == [
        "running, step 7 of 20; 1 wait",
        "  actor waits for 8 groups, blocked by rollout: 12.0 s so far, 48.0 s left",
        "    → rollout is busy: generating 24 samples",
    ]
    assert answer.culprit == "rollout"


def test_dropped_events_are_shown_for_running_and_ended_runs():
    said, log = status(Heartbeat("actor", "busy", doing="training")), [{"event": "events dropped", "count": 6}] * 2
    for state in (RUNNING, RunHealth("finished")):
        lines = why(said, state, 5000.0, log).lines()
        assert any("12 events were dropped before they were written" in line for line in lines)


def test_a_missed_deadline_is_shown_and_the_longest_wait_comes_first():
    said = status(
        Heartbeat("rollout", "waiting", waits=(Wait("rollout", "weights policy@0.7", "actor", 99.0, 400.0),)),
        waiting("actor", "8 groups", "reward", 10.0, 98.0),
    )
    first, second = why(said, RUNNING, 5000.0).waits
    assert "its deadline passed 2.0 s ago" in first.sentence()
    assert second.sentence().startswith("rollout waits for weights policy@0.7, blocked by actor: 1.0 s")


def test_roles_that_wait_for_each_other_are_a_ring():
    said = status(
        waiting("actor", "rows", "advantages"),
        waiting("advantages", "rows", "rollout"),
        waiting("rollout", "a grant", "actor"),
    )
    answer = why(said, RUNNING, 5000.0)
    assert set(answer.ring) == {"actor", "advantages", "rollout"}
    assert "deadlock: " in list(answer.lines())[1]


def test_a_busy_role_breaks_the_ring():
    said = status(
        waiting("actor", "rows", "rollout"),
        Heartbeat("rollout", "busy", waits=(Wait("rollout", "a grant", "actor", 90.0, 150.0),)),
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


@pytest.mark.parametrize(
    ("said", "wall", "state", "headline"),
    [
        (
            status(waiting("actor", "x", "y", 0, 1), state="stopped"),
            9e9,
            "stopped",
            "the run has ended: stopped after step 7",
        ),
        (status() | {"pid": os.getpid()}, 5400.0, "silent", "6 min 40 s ago"),
        (status() | {"host": "elsewhere", "pid": 2**22 + 1}, 5004.0, "running", "running, step 7 of 20"),
        (None, 0.0, "starting", "starting: no status written yet"),
    ],
    ids=["ended", "old status", "process of another machine", "no status"],
)
def test_the_headline_shows_the_state_of_a_run(tmp_path, said, wall, state, headline):
    found, line = answer(tmp_path, said, wall)
    assert found == state
    assert headline in line


def test_the_status_of_a_dead_process_is_stale(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait(timeout=30)
    state, headline = answer(tmp_path, status() | {"pid": gone.pid}, 5004.0)
    assert state == "lost"
    assert headline.startswith("stale: the run wrote its last status 4.0 s ago at step 7 of 20; its process")
    assert "relax resume run" in headline


ENGINES = {
    "engine-0": {"serving": True, "paused": False, "version": "actor@0.6", "running": 2, "silent_s": 0.1},
    "engine-1": {"serving": True, "paused": False, "version": "actor@0.5", "running": 3, "silent_s": 31.0},
}
GROUP = {"group": 41, "for_s": 33.0, "samples": 8, "missing": 3}
LEAVE = Wait("rollout", "leave to start groups", "actor (its version bounds staleness)", 95.0, 96.0)


def waiting_for_rollout(facts, *more, waits=(LEAVE,), state="busy"):
    return status(
        waiting("actor", "4 groups for step 7", "rollout, then advantages", 60.0, 660.0),
        waiting("advantages", "finished groups", "rollout", 60.0, 101.0),
        Heartbeat("rollout", state, "generating", waits, facts, at=100.0),
        *more,
    )


def test_the_chain_ends_at_the_engine_that_has_been_silent_for_longest():
    answer = why(waiting_for_rollout({"engines": ENGINES, "under_way": [GROUP | {"at": "engines"}]}), RUNNING, 5001.0)
    assert answer.culprit == "engine-1" and answer.ring == ()
    assert list(answer.lines()) == [
        "running, step 7 of 20; 3 waits",
        "  actor waits for 4 groups for step 7, blocked by rollout, then advantages: 41.0 s so far, 9 min 19 s left",
        "    → rollout has group 41 under way, which lacks 3 of 8 samples, at the engines: 34.0 s so far",
        "      → engine-1 (version actor@0.5) runs 3 requests: 32.0 s so far",
        "  advantages waits for finished groups, blocked by rollout: 41.0 s so far, 0.0 s left",
        "  group 41 under way, which lacks 3 of 8 samples, at the engines: 34.0 s old",
        "  engine-0 (version actor@0.6) runs 2 requests, silent for 1.1 s",
        "  engine-1 (version actor@0.5) runs 3 requests, silent for 32.0 s",
    ]


def test_the_chain_ends_at_the_reward_with_samples_to_judge():
    judging = {"rewards": {"maths": 8}, "for_s": 30.0}
    facts = {"engines": ENGINES, "under_way": [GROUP | {"missing": 0, "at": "rewards"}], "judging": judging}
    answer = why(waiting_for_rollout(facts), RUNNING, 5000.0)
    assert answer.culprit == "reward maths"
    assert "reward maths has 8 samples to judge: 30.0 s so far" in list(answer.lines())[3]


def test_the_chain_of_paused_engines_ends_at_the_holder_of_their_devices():
    paused = {name: engine | {"paused": True} for name, engine in ENGINES.items()}
    devices = Wait("rollout", "the devices, to generate", "reference", 80.0, 3680.0)
    said = waiting_for_rollout(
        {"engines": paused, "under_way": [GROUP | {"at": "engines"}]}, Heartbeat("reference", "busy", "filling ref_log_probs"),
        waits=(devices,),
    )  # fmt: skip
    answer = why(said, RUNNING, 5000.0)
    assert [link.who for link in answer.chain] == ["actor", "rollout", "reference"]


def test_the_chain_skips_an_idle_rollout_and_ends_at_the_busy_role():
    credit = Heartbeat("advantages", "busy", "crediting", facts={"groups": 8})
    said = status(
        waiting("actor", "4 groups", "rollout, then advantages", 60.0, 660.0),
        credit,
        Heartbeat("rollout", "waiting", waits=(LEAVE,), facts={"under_way": [], "engines": ENGINES}),
    )
    assert why(said, RUNNING, 5000.0).culprit == "advantages"


def test_an_engine_that_does_not_finish_loading_is_the_cause():
    late = {"engine-0": ENGINES["engine-0"] | {"running": 0, "loading": "actor@0.7"}}
    answer = why(waiting_for_rollout({"engines": late, "under_way": []}, state="waiting"), RUNNING, 5000.0)
    assert answer.culprit == "engine-0" and answer.chain[-1].says == "(version actor@0.6) loads actor@0.7"


def test_a_lost_run_is_shown_in_its_last_written_state():
    facts = {"engines": ENGINES, "under_way": [GROUP | {"at": "engines"}]}
    answer = why(waiting_for_rollout(facts), RunHealth("lost", 400.0, "its process 7 is gone"), 5400.0)
    assert answer.headline.startswith("stale: the run wrote its last status 6 min 40 s ago")
    assert answer.culprit == "engine-1" and answer.chain[0].for_s == 40.0


def test_samples_in_play_the_limit_on_more_and_the_caches_are_shown():
    cached = {"engine-0": ENGINES["engine-0"] | {"kv_capacity": 9000, "kv_running": 8100, "kv_idle": 700}}
    scheduling = {"in_play": 64, "at_engines": 5, "prelaunched": 8, "held_by": "engines"}
    facts = {"engines": cached, "under_way": [GROUP | {"at": "engines"}], "scheduling": scheduling}
    details = why(waiting_for_rollout(facts), RUNNING, 5000.0).details
    assert (
        "64 samples in play, 5 of them at the engines; environments of 8 more have started (placement.rollout.prelaunch); "
        "no new group starts: the engines have no room"
    ) in details
    assert any("which hold 8,100 of 9,000 cache tokens, 700 of sessions between turns" in line for line in details)
    bound = facts | {"scheduling": scheduling | {"held_by": "placement.rollout.sessions", "prelaunched": 0}}
    details = why(waiting_for_rollout(bound), RUNNING, 5000.0).details
    assert any(line.endswith("no new group starts: limited by placement.rollout.sessions") for line in details)


def test_a_polling_wait_is_shown_without_a_deadline():
    polling = Wait("rollout", "leave to start groups", "actor", 60.0, 100.5, polls=True)
    (found,) = why(status(Heartbeat("rollout", "waiting", waits=(polling,))), RUNNING, 5000.0).waits
    assert found.sentence().endswith("blocked by actor: 40.0 s so far")


def asking_a_judge(**pool):
    facts = {
        "under_way": [{"group": 3, "for_s": 9.0, "samples": 4, "missing": 0, "at": "rewards"}],
        "judging": {"rewards": {"judge": 4}, "for_s": 8.0},
        "pools": {"judge": {"open": 4, "for_s": 7.0, **pool}},
    }
    said = status(waiting("actor", "8 groups", "rollout"), Heartbeat("rollout", "busy", "generating", facts=facts))
    return why(said, RUNNING, 5000.0)


def test_a_judge_with_open_requests_is_named_with_its_engine():
    engine = {"serving": False, "version": "judge@0.0", "running": 0, "silent_s": 0.0}
    answer = asking_a_judge(engines={"judge-engine-0": engine})
    assert [link.who for link in answer.chain][-3:] == ["reward judge", "engine pool judge", "judge-engine-0"]
    assert answer.chain[-2].says == "has 4 open requests"
    assert any(line.startswith("judge-engine-0 (version judge@0.0) does not serve") for line in answer.details)


def test_a_judge_that_waits_for_its_turn_is_shown_as_waiting():
    answer = asking_a_judge(engines={}, paused=True)
    assert answer.culprit == "engine pool judge"
    assert answer.chain[-1].says == "has 4 open requests and waits for its turn on the devices"


def test_a_paused_run_says_what_for_and_how_to_continue(tmp_path):
    reason = "a review of step 8, since guard reward: it fell"
    said = status(
        Heartbeat("actor", "paused", waits=(Wait("actor", reason, "a person", 90.0, 500.0),)),
        waiting("rollout", "a grant", "actor", 95.0, 150.0),
    )
    run = run_saying(tmp_path, said)
    lines = list(why(run.status(), health(run, 5000.0), 5000.0).lines())
    assert lines[0] == f"paused, step 7 of 20, for {reason}; continue with `relax continue {run.name}`, or stop the run"
    assert lines[1].startswith(f"  actor waits for {reason}, blocked by a person: 10.0 s so far")
    assert pause_reason(said) == reason and not pause_reason(status(Heartbeat("actor", "busy")))
