# SPDX-License-Identifier: Apache-2.0
"""Changes of a live run: what may be asked, once, and when a change is done; and the token of a control API."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import (
    COMMANDS,
    Command,
    Continue,
    Evaluate,
    Profile,
    SaveCheckpoint,
    ScaleRequest,
    Stop,
)
from relax_core.api.trainer import Trainer
from relax_core.control_api.client import read_token, route
from relax_core.control_api.operations import ACTIONS, KEPT, Book, Facts, Refused
from relax_core.control_api.run_control import RunControl, check_profiles
from relax_core.engines.scaling import JOINING, PoolScaling
from relax_core.observe.run_directory import RunDirectory
from relax_core.registry.catalogue import Catalogue
from relax_core.views.follower import EvaluationCount, ProfileCount
from relax_core.views.run import RunView

TOKEN = "0123456789abcdef"
LIVE = Facts("running", ended=False, step=3, checkpoint=2, pid=7, sets=2, evaluations=5)
FACTS = st.builds(
    Facts, st.just("running"), st.booleans(), st.integers(0, 5), st.integers(0, 5), st.sampled_from(["", "a user"]),
    st.integers(1, 2), st.integers(0, 2), st.integers(0, 4),
)  # fmt: skip


@given(st.lists(st.tuples(FACTS, st.none() | st.tuples(st.sampled_from(ACTIONS), st.sampled_from("abc"))), max_size=30))
def test_whatever_comes_operations_keep_their_rules(events: list[tuple[Facts, Any]]) -> None:
    book, requests = Book(), 0
    for now, (facts, asked) in enumerate(events):
        before = dict(book.operations)
        if asked is None:
            again = book.settle(facts, now)
            assert all(before[one.id].pid != facts.pid == one.pid for one in again)
        else:
            try:
                operation, asks = book.ask(COMMANDS[asked[0]](), asked[1], facts, now)
            except Refused:
                assert set(book.operations) == set(before)
            else:
                new = operation.id not in before
                requests += new
                assert (operation.action, operation.key) == asked
                assert asks == (new and operation.state == "requested")
        found = book.operations.values()
        assert len({one.key for one in found}) == len(found) == requests == book.number
        waiting = [one.action for one in found if one.state == "requested"]
        assert len(waiting) == len(set(waiting))
        assert all(book.operations[one.id] == one for one in before.values() if one.state != "requested")
        assert Book.of(json.loads(json.dumps(book.plain()))).operations == book.operations


def test_each_change_is_done_by_what_the_run_then_says() -> None:
    ends = {
        "pause": replace(LIVE, state="paused", pause="a user"), "checkpoint": replace(LIVE, step=4, checkpoint=3),
        "stop": replace(LIVE, state="stopped", ended=True), "continue": LIVE, "evaluate": replace(LIVE, evaluations=7),
    }  # fmt: skip
    for action, then in ends.items():
        book, first = Book(), replace(LIVE, pause="a user") if action == "continue" else LIVE
        made, _ = book.ask(COMMANDS[action](), "key", first, 1.0)
        assert book.settle(replace(first, pid=8), 2.0) == [replace(made, pid=8, detail=book.operations["1"].detail)]
        book.settle(replace(then, pid=8), 3.0)
        assert (book.operations["1"].state, book.operations["1"].changed_at) == ("done", 3.0)
    for action, ended in (("pause", "failed"), ("stop", "lost")):
        book = Book()
        book.ask(COMMANDS[action](), "key", LIVE, 1.0)
        book.settle(replace(LIVE, state=ended, ended=True), 2.0)
        assert (book.operations["1"].state, book.operations["1"].detail) == ("failed", f"the run is {ended}")


def test_a_change_that_needs_nothing_of_the_run_is_done_at_once() -> None:
    ended = replace(LIVE, state="stopped", ended=True, checkpoint=3)
    for action, facts in (
        ("pause", replace(LIVE, pause="a user")), ("checkpoint", replace(LIVE, checkpoint=3)), ("checkpoint", ended),
        ("stop", ended),
    ):  # fmt: skip
        made, asks = Book().ask(COMMANDS[action](), "key", facts, 1.0)
        assert (made.state, asks) == ("done", False)
    lost = replace(LIVE, state="lost", ended=True, checkpoint=2)
    for action, facts in (("pause", replace(ended, pause="a user")), ("stop", lost), ("checkpoint", lost)):
        with pytest.raises(Refused, match="only a live run can be changed"):
            Book().ask(COMMANDS[action](), "key", facts, 1.0)


def test_a_run_that_is_paused_again_after_a_step_has_continued() -> None:
    book, paused = Book(), replace(LIVE, pause="a guard")
    book.ask(Continue(), "key", paused, 1.0)
    book.settle(paused, 2.0)
    assert book.operations["1"].state == "requested"
    book.settle(replace(paused, step=4), 3.0)
    assert book.operations["1"].state == "done"


@given(st.integers(0, 9), st.integers(1, 3), st.lists(st.integers(0, 2), max_size=8))
def test_an_evaluation_is_done_once_every_set_has_a_new_one(before: int, sets: int, more: list[int]) -> None:
    book, facts = Book(), replace(LIVE, sets=sets, evaluations=before)
    asked, new = book.ask(Evaluate(), "key", facts, 0.0)
    assert new and asked.evaluations == before
    for now, added in enumerate(more, 1):
        facts = replace(facts, evaluations=facts.evaluations + added)
        assert book.settle(facts, now) == []
        done = facts.evaluations - before >= sets
        assert book.operations["1"].state == ("done" if done else "requested")
        assert book.ask(Evaluate(), "key", facts, now) == (book.operations["1"], False)
    was = book.operations["1"].state
    book.settle(replace(facts, state="stopped", ended=True), 99.0)
    assert book.operations["1"].state == ("failed" if was == "requested" else "done")


def test_a_run_without_evaluation_sets_is_not_asked_to_evaluate() -> None:
    with pytest.raises(Refused) as refused:
        Book().ask(Evaluate(), "key", replace(LIVE, sets=0), 0.0)
    assert (refused.value.status, refused.value.field) == (409, "eval.every")


def test_evaluations_are_counted_from_the_run_s_events(write_run: Callable[..., Path], tmp_path: Path) -> None:
    count = EvaluationCount(RunView(write_run(tmp_path, steps=30)))
    assert (count.sets, count.now(), count.now()) == (1, 1, 1)
    none = write_run(tmp_path, steps=1, name="none")
    (none / "config.toml").write_text("[eval]\nevery = 0\n")
    assert EvaluationCount(RunView(none)).sets == 0
    (none / "config.toml").write_text(
        '[eval]\nevery = 5\nsets = [{name = "a", path = "a"}, {name = "b", path = "b"}]\n'
    )
    assert EvaluationCount(RunView(none)).sets == 2


def test_profiles_are_done_once_all_their_steps_are_recorded() -> None:
    book, facts = Book(), replace(LIVE, profiles=4)
    asked, new = book.ask(Profile(2), "key", facts, 0.0)
    assert new and (asked.state, asked.profiles) == ("requested", 4)
    with pytest.raises(Refused, match="which is still requested"):
        book.ask(Profile(1), "other", facts, 1.0)
    for profiles, state in ((5, "requested"), (6, "done")):
        book.settle(replace(facts, profiles=profiles), 2.0)
        assert book.operations["1"].state == state
    again, _ = book.ask(Profile(2), "third", replace(facts, profiles=6), 3.0)
    book.settle(replace(facts, profiles=7, state="stopped", ended=True), 4.0)
    assert book.operations[again.id].state == "failed"
    for steps in (0, 101, -1):
        with pytest.raises(Refused) as refused:
            book.ask(Profile(steps), "wrong", facts, 5.0)
        assert (refused.value.status, refused.value.field) == (400, "steps")


def test_a_request_for_profiles_is_passed_to_the_run_once(
    write_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, steps=4)
    control = RunControl(RunView(run))
    monkeypatch.setattr(RunControl, "facts", lambda _: replace(LIVE, profiles=4))
    control.ask(Profile(3), "three")
    RunDirectory.open(run).take_commands()
    monkeypatch.setattr(RunControl, "facts", lambda _: replace(LIVE, profiles=6, pid=8))
    monkeypatch.setattr(ProfileCount, "now", lambda _: 6)
    control.settle()
    assert RunDirectory.open(run).take_commands() == [Profile(1)], "a new process profiles only the missing steps"
    (run / "config.toml").write_text('plugins = []\ntrainer = "none-such"\n')
    check_profiles(RunView(run))
    monkeypatch.setattr(Catalogue, "target", lambda *_: Trainer)
    with pytest.raises(Refused, match=r"trainer\.name: got none-such; this trainer can't record profiles"):
        check_profiles(RunView(run))


def test_old_operations_are_forgotten_but_never_open_ones() -> None:
    book = Book()
    book.ask(Stop(), "first", LIVE, 0.0)
    for number in range(KEPT + 5):
        book.ask(SaveCheckpoint(), f"{number}", LIVE, 1.0)
        book.settle(replace(LIVE, checkpoint=3), 1.0)
    assert len(book.operations) == KEPT and "1" in book.operations and "2" not in book.operations


def test_a_token_is_long_and_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    os.mkfifo(tmp_path / "pipe", 0o600)  # no process writes to it, so an ordinary reader would wait for ever
    no_file = "not a regular file"
    for odd, said in ((tmp_path / "pipe", no_file), (Path("/dev/zero"), no_file), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"--token-file: got {odd} .*{said}"):
            read_token(odd)
    for value, said in (("", "got nothing"), ("short", "of 5 characters")):
        monkeypatch.setenv("RELAX_TOKEN", value)
        with pytest.raises(ConfigError, match=said):
            read_token(None)


def pools() -> dict[str, PoolScaling]:
    judge = PoolScaling("judge", ["judge-engine-0"], 1, "judge-engine", ("placement", "engines on gpu:1", "use CPUs"))
    rollout = PoolScaling("rollout", ["engine-0", "engine-1"], 1, addresses=["127.0.0.1:8701"])
    rollout.nodes, judge.nodes = {"engine-0": "10.0.0.1", "engine-1": "10.0.0.2"}, {"judge-engine-0": "10.0.0.3"}
    return {"rollout": rollout, "judge": judge}


def test_an_operation_follows_what_the_pool_says() -> None:
    pool = pools()["rollout"]
    facts = replace(LIVE, pools={"rollout": pool})
    book, request = Book(), ScaleRequest("key", target=3)
    book.ask(request, "key", facts, 1.0)
    book.settle(facts, 2.0)
    assert (book.operations["1"].state, book.operations["1"].detail) == ("requested", "")
    assert book.settle(replace(facts, pid=8), 2.0)[0].command == request, "a new process of the run is asked again"
    pool.ask(request, 3.0)
    pool.on_step("engine-2", "creating", 3.0)
    book.settle(replace(facts, pid=8), 3.0)
    assert (book.operations["1"].state, book.operations["1"].detail) == ("requested", "rollout-1 is creating")
    for step in JOINING[2:]:
        pool.on_step("engine-2", step, 4.0)
    book.settle(replace(facts, pid=8), 4.0)
    assert (book.operations["1"].state, book.operations["1"].detail) == ("done", "rollout-1 is active")


@pytest.mark.parametrize("ended", [False, True])
def test_an_operation_that_fails_says_why(ended: bool) -> None:
    pool = pools()["rollout"]
    facts = replace(LIVE, pools={"rollout": pool})
    book = Book()
    book.ask(ScaleRequest("key", target=3), "key", facts, 1.0)
    pool.ask(ScaleRequest("key", target=3), 2.0)
    pool.on_step("engine-2", "failed", 3.0, "engine-2: no memory")
    book.settle(Facts("stopped", ended=True) if ended else facts, 4.0)
    wanted = "the run is stopped" if ended else "rollout-1 is failed; engine-2: no memory"
    assert (book.operations["1"].state, book.operations["1"].detail) == ("failed", wanted)


def test_a_cancellation_that_comes_too_late_has_failed() -> None:
    pool = pools()["rollout"]
    facts = replace(LIVE, pools={"rollout": pool})
    pool.ask(ScaleRequest("grow", target=3), 1.0)
    book = Book()
    book.ask(ScaleRequest("key", cancel="rollout-1"), "key", facts, 2.0)
    for step in JOINING[1:]:
        pool.on_step("engine-2", step, 3.0)
    book.settle(facts, 4.0)
    assert (book.operations["1"].state, book.operations["1"].detail) == ("failed", "rollout-1 is active")


@pytest.mark.parametrize(
    ("command", "path", "fields"),
    [
        (Stop(), "/stop", {}),
        (Profile(3), "/profile", {"steps": 3}),
        (ScaleRequest("k", target=3), "/engines", {"pool": "rollout", "target": 3, "keep_partial": False}),
        (ScaleRequest("k", engine="engine-1"), "/engines/engine-1/drain", {}),
        (ScaleRequest("k", address="a:1"), "/engines/join", {"address": "a:1"}),
        (ScaleRequest("k", node="10.0.0.1"), "/engines/drain", {"node": "10.0.0.1"}),
        (ScaleRequest("k", cancel="rollout-1"), "/operations/rollout-1/cancel", {}),
    ],
)
def test_each_command_has_its_route(command: Command, path: str, fields: dict[str, Any]) -> None:
    assert route(command) == (path, fields)
