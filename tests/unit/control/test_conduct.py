# SPDX-License-Identifier: Apache-2.0
"""The run controller over a runner that follows a script: how a run ends is said once, rightly, and after its last events."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from relax_core.api.bus import Account
from relax_core.api.errors import DiskFull, Diverged, InfrastructureError, RelaxError, WorkerDied
from relax_core.api.events import FirstStepSeen, RunClosed, RunFinished, RunOpened, StepFinished, WorkAtEnd
from relax_core.api.role import Heartbeat
from relax_core.api.run_commands import Command, Evaluate, Pause, Profile, SaveCheckpoint, Stop
from relax_core.control import run
from relax_core.control.planner import plan
from relax_core.control.prepare import Prepared, PreparedStage
from relax_core.control.run import RunController, total
from relax_core.control.stages import StageDirectory
from relax_core.observe.epoch import RunEpoch
from relax_core.observe.run_directory import RunDirectory
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.launch import Launch, RoleEnd
from relax_core.runners.run_status import RunStatusService
from relax_core.views.run import RunView
from tests.unit.control.conftest import configured
from tests.unit.roles.virtual_time import VirtualClock, run_virtual

Life = Callable[["ScriptedRunner"], Coroutine[Any, Any, None]]
Lives = dict[str, Life]
GRACES = {"grace_s": 30.0, "preemption_grace_s": 300.0}


class ScriptedRunner:
    """Each role is a coroutine; whatever it raises is how the role ended."""

    def __init__(self, lives: Lives, start: Exception | None = None) -> None:
        self._lives, self._start = lives, start
        self.run_status, self.bus = RunStatusService(VirtualClock()), self
        self._ends: list[RoleEnd] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.closed = 0

    async def start(self, launch: Launch) -> None:
        if self._start is not None:
            raise self._start
        self._tasks = [asyncio.create_task(self._live(role)) for role in launch.plan.roles]

    async def _live(self, role: str) -> None:
        await self.run_status.heartbeat(Heartbeat(role, "busy"))
        try:
            await self._lives.get(role, until_told)(self)
            self._ends.append(RoleEnd(role))
        except Exception as error:
            self._ends.append(RoleEnd(role, error))

    async def ended(self, wait_s: float) -> tuple[RoleEnd, ...]:
        ends, self._ends = tuple(self._ends), []
        return ends

    async def account(self) -> Account:
        return Account(8, 6, 0, {"filtered": 1}, 1, True)

    async def statistics(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self.closed += 1
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def until_told(runner: ScriptedRunner) -> None:
    """Ends when it is told to, or after its time."""
    await runner.run_status.commands("actor", 0, 5.0)


async def deaf(runner: ScriptedRunner) -> None:
    await asyncio.sleep(1e6)


def conducted(
    folder: Path,
    lives: Lives,
    start: Exception | None = None,
    stop_after_s: float | None = None,
    preempt_after_s: float | None = None,
    ask_after_s: float | None = None,
    before: Callable[[Prepared], None] = lambda _: None,
    **layer: Any,
) -> tuple[dict[str, Any], Exception | None, float]:
    """The run's summary file, what was raised, and how long it took; `layer`: further tables of the configuration."""

    async def scene() -> tuple[dict[str, Any], Exception | None, float]:
        runner = ScriptedRunner(lives, start)
        prepared = _prepared(folder, **layer)
        before(prepared)
        controller = RunController(prepared, runner, clock=VirtualClock())  # type: ignore[arg-type]
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, controller.stop, "SIGINT")
        if preempt_after_s is not None:
            asyncio.get_running_loop().call_later(preempt_after_s, controller.stop, "SIGTERM", True)
        if ask_after_s is not None:
            asyncio.get_running_loop().call_later(ask_after_s, controller.checkpoint)
            asyncio.get_running_loop().call_later(2 * ask_after_s, prepared.directory.send, SaveCheckpoint())
        raised = None
        try:
            await controller.run()
        except RelaxError as error:
            raised = error
        assert runner.closed == 1
        return prepared.directory.read("summary") or {}, raised, asyncio.get_running_loop().time()

    return run_virtual(scene(), 1e4)


def _prepared(folder: Path, **layer: Any) -> Prepared:
    catalogue = Catalogue.load()
    config = configured(catalogue, checkpoint=GRACES, **layer)
    directory = RunDirectory.create(folder / "run", "run", datetime(2026, 1, 1), Random(0))
    epoch = RunEpoch.begin(directory.path)
    launch = Launch("run", str(directory.path), config.dump(), plan(config, catalogue), epoch=epoch)
    return Prepared(catalogue, directory, (PreparedStage(config, launch),))


async def steps(runner: ScriptedRunner) -> None:
    for step in (1, 2, 3):
        await asyncio.sleep(1.0)
        await runner.run_status.emit(StepFinished(step, {"reward/mean": 0.5}))


def test_a_run_whose_roles_return_has_finished_and_its_last_event_counts(tmp_path: Path) -> None:
    """The actor's last event comes in the moment it ends."""
    summary, raised, _ = conducted(tmp_path, {"actor": steps})
    assert raised is None
    assert (summary["status"], summary["steps"], summary["samples_trained"]) == ("finished", 3, 6)


OUTPAID = {"text": "12", "earned": 0.0, "best": 1.0, "response": "21"}


async def outpaid(runner: ScriptedRunner) -> None:
    await runner.run_status.emit(FirstStepSeen("rollout", {"tasks": [{"task": "t1", "answer": OUTPAID}]}))
    await steps(runner)


def first_steps(folder: Path) -> dict[int, dict[str, str]]:
    """The states of the checks that the run recorded, by step and name."""
    (folder / "run" / "config.toml").touch()
    found = RunView(folder / "run").first_steps()
    return {step: {check.name: check.state for check in checks} for step, checks in found.items()}


def test_the_first_step_is_checked_once_with_what_the_roles_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, raised, _ = conducted(tmp_path, {"actor": outpaid})
    assert (summary["status"], summary["steps"], raised) == ("finished", 3, None)
    (found,) = first_steps(tmp_path).values()
    assert {name for name, state in found.items() if state != "not applicable"} == {"the task's own answer earns most"}
    warned = "step 1 failed 1 of its checks, which `relax why` explains: the task's own answer earns most"
    assert capsys.readouterr().err.count(warned) == 1


@pytest.mark.parametrize(("reaction", "status"), [("stop", "diverged"), ("off", "finished")])
def test_a_failed_check_stops_the_run_where_it_is_to_and_no_check_is_made_where_they_are_off(
    tmp_path: Path, reaction: str, status: str
) -> None:
    summary, raised, _ = conducted(tmp_path, {"actor": outpaid}, guards={"first_step": reaction})
    assert summary["status"] == status and (reaction == "off") == (first_steps(tmp_path) == {})
    if reaction == "stop":
        assert isinstance(raised, Diverged) and summary["steps"] == 1
        assert str(raised).startswith(
            "guards.first_step is stop: step 1: check failed: the task's own answer earns most: at"
        )
        assert "task t1: '21' earns 1, and the answer '12' only 0" in summary["error"]


def published(folder: Path) -> Path:
    version = folder / "run" / "weights" / "actor@0.7.safetensors"
    version.parent.mkdir(exist_ok=True)
    version.write_bytes(b"weights")
    return version


def test_versions_that_a_killed_run_published_go_before_its_roles_start_again(tmp_path: Path) -> None:
    seen = []

    async def looks(runner: ScriptedRunner) -> None:
        seen.append((tmp_path / "run" / "weights").exists())
        published(tmp_path)

    def killed(prepared: Prepared) -> None:
        published(tmp_path)

    _, raised, _ = conducted(tmp_path, {"actor": looks}, before=killed)
    assert raised is None and seen == [False]
    assert not (tmp_path / "run" / "weights").exists(), "nobody reads those of a run that has ended"


def test_versions_of_a_later_start_stay_when_an_earlier_one_ends(tmp_path: Path) -> None:
    async def is_resumed(runner: ScriptedRunner) -> None:
        RunEpoch.begin(tmp_path / "run")
        published(tmp_path)

    _, raised, _ = conducted(tmp_path, {"actor": is_resumed})
    assert raised is None and (tmp_path / "run" / "weights" / "actor@0.7.safetensors").exists()


def listener(role: str, heard: list[tuple[str, Command]]) -> Life:
    """Note the commands of a role until it is told to stop."""

    async def listens(runner: ScriptedRunner) -> None:
        last, command = 0, None
        while command != Stop():
            for number, command in await runner.run_status.commands(role, last, 100.0):
                last = number
                heard.append((role, command))

    return listens


@pytest.fixture
def heard() -> list[tuple[str, Command]]:
    """The commands that roles heard, with the role."""
    return []


@pytest.fixture
def listeners(heard: list[tuple[str, Command]]) -> Lives:
    return {role: listener(role, heard) for role in ("rollout", "advantages", "actor")}


def test_a_stop_is_sent_to_every_role_and_is_not_a_failure(
    tmp_path: Path, listeners: Lives, heard: list[tuple[str, Command]]
) -> None:
    summary, raised, seconds = conducted(tmp_path, listeners, stop_after_s=3.0)
    assert (summary["status"], raised) == ("stopped", None)
    assert sorted(heard) == [(role, Stop()) for role in ("actor", "advantages", "rollout")]
    assert seconds < 4.0


def test_requests_for_a_checkpoint_reach_the_roles_with_state_once_each(
    tmp_path: Path, listeners: Lives, heard: list[tuple[str, Command]]
) -> None:
    """By a signal of the process first, then by a file of the run directory."""
    conducted(tmp_path, listeners, stop_after_s=10.0, ask_after_s=3.0)
    assert [each for each in heard if each[1] == SaveCheckpoint()] == [("actor", SaveCheckpoint())] * 2
    assert not list((tmp_path / "run" / ".commands").iterdir())


@pytest.mark.parametrize(
    ("command", "roles"),
    [(Pause(), ["actor"]), (Evaluate(), ["actor", "rollout"]), (Profile(3), ["actor", "rollout"])],
)
def test_a_command_reaches_only_the_roles_that_obey_it(
    tmp_path: Path, listeners: Lives, heard: list[tuple[str, Command]], command: Command, roles: list[str]
) -> None:
    conducted(tmp_path, listeners, stop_after_s=5.0, before=lambda run: run.directory.send(command))
    assert sorted(role for role, one in heard if one == command) == roles


@pytest.mark.parametrize(("role", "status"), [("actor", "interrupted"), ("rollout", "stopped")])
def test_roles_that_do_not_stop_in_time_are_ended(tmp_path: Path, role: str, status: str) -> None:
    """Only of one with state is something lost, and so only it has the long grace."""
    summary, raised, seconds = conducted(tmp_path, {role: deaf}, stop_after_s=2.0)
    assert (summary["status"], raised) == (status, None)
    grace_s = GRACES["grace_s"] if role == "actor" else run.STATELESS_GRACE_S
    assert 2.0 + grace_s <= seconds < 2.0 + grace_s + 2.0
    assert summary.get("busy", []) == ([role] if status == "interrupted" else [])


def saves_for(seconds: float) -> Life:
    """Ends so long after it was told to stop."""

    async def saves(runner: ScriptedRunner) -> None:
        await runner.run_status.commands("actor", 0, 1e6)
        await asyncio.sleep(seconds)

    return saves


@pytest.mark.parametrize(
    ("saves_s", "stop_after_s", "preempt_after_s", "status", "seconds"),
    [
        (25.0, 2.0, None, "stopped", 27.0),
        (250.0, None, 2.0, "preempted", 252.0),
        (200.0, 2.0, 12.0, "preempted", 202.0),
        (1e6, None, 2.0, "interrupted", 302.0),
    ],
)
def test_a_checkpoint_is_waited_for_as_long_as_the_notice_allows(
    tmp_path: Path,
    saves_s: float,
    stop_after_s: float | None,
    preempt_after_s: float | None,
    status: str,
    seconds: float,
) -> None:
    """A preemption allows more time than a stop, also where it comes during the stop."""
    lives = {"actor": saves_for(saves_s)}
    summary, raised, took = conducted(tmp_path, lives, stop_after_s=stop_after_s, preempt_after_s=preempt_after_s)
    assert (summary["status"], raised) == (status, None)
    assert summary.get("busy", []) == (["actor"] if status == "interrupted" else [])
    assert seconds <= took < seconds + 2.0


def test_a_role_that_fails_ends_the_others_and_the_run_with_its_reason(tmp_path: Path) -> None:
    error = RelaxError("6 updates in a row were not finite")

    async def dies(runner: ScriptedRunner) -> None:
        await steps(runner)
        raise error

    summary, raised, seconds = conducted(tmp_path, {"actor": dies, "rollout": deaf})
    assert raised is error
    assert (summary["status"], summary["error"], summary["steps"]) == ("failed", str(error), 3)
    assert not summary["restarts"] and seconds < 5.0


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (WorkerDied("hub died during claim"), True),
        (DiskFull("metrics.jsonl: no space left"), False),
        (RelaxError("NaN"), False),
    ],
)
def test_the_summary_of_a_failed_run_says_whether_another_try_may_help(
    tmp_path: Path, error: RelaxError, retry: bool
) -> None:
    async def fails(runner: ScriptedRunner) -> None:
        await steps(runner)
        raise error

    summary, raised, _ = conducted(tmp_path, {"actor": fails})
    assert raised is error and (summary["exit_code"], summary["retry"]) == (error.exit_code, retry)


def test_an_error_that_is_nobodys_names_the_role(tmp_path: Path) -> None:
    async def breaks(runner: ScriptedRunner) -> None:
        raise ZeroDivisionError("division by zero")

    summary, raised, _ = conducted(tmp_path, {"advantages": breaks})
    assert str(raised) == summary["error"] == "role advantages: ZeroDivisionError: division by zero"


def test_a_runner_that_cannot_start_is_closed_and_reported(tmp_path: Path) -> None:
    summary, raised, _ = conducted(tmp_path, {}, start=InfrastructureError("no free port"))
    assert str(raised) == "no free port" and summary["status"] == "failed"
    assert not summary["retry"], "a run that never worked is more likely for a person"


def test_a_stop_before_anything_is_ready_ends_at_once(tmp_path: Path) -> None:
    summary, raised, seconds = conducted(tmp_path, {"actor": deaf}, stop_after_s=0.0)
    assert (summary["status"], raised) == ("stopped", None)
    assert seconds < 2.0


def test_a_restarted_stage_deletes_only_its_own_files(tmp_path: Path) -> None:
    """It was broken off before its first checkpoint."""
    prepared = _prepared(tmp_path)
    config, launch = prepared.stages[0].config, prepared.stages[0].launch
    for step in (1, 2, 3, 4):  # two of the stage before it, two of its own
        prepared.directory.append_metrics(step, 0.0, {"reward/mean": 0.1}, stage="warm-start" if step < 3 else "rl")
        prepared.directory.append_samples(step, [{"reward": 0.1}])
    own = StageDirectory(1, "rl", prepared.directory.path / "stages" / "1-rl")
    own.write(config)
    stage = PreparedStage(config, launch, own, first_step=2)

    async def scene() -> None:
        runner = ScriptedRunner({"actor": steps})
        again = Prepared(prepared.catalogue, prepared.directory, (stage,))
        await RunController(again, runner, clock=VirtualClock()).run()  # type: ignore[arg-type]

    run_virtual(scene(), 1e4)
    lines = [(line["step"], line["reward/mean"]) for line in prepared.directory.metrics()]
    assert lines == [(1, 0.1), (2, 0.1), (3, 0.5), (4, 0.5), (5, 0.5)]
    assert prepared.directory.sample_steps() == [1, 2]
    assert (prepared.directory.read("summary") or {})["steps"] == 5


def test_accounts_of_stages_are_added_by_reason_and_length() -> None:
    one = {
        "samples_dropped": {"stale": 8},
        "dropped_lengths": {"stale": {"4": 7, "8": 1}},
        "balanced": True,
        "seconds": 1.5,
    }
    other = {"samples_dropped": {"stale": 4, "deadline": 4}, "dropped_lengths": {"stale": {"4": 4}, "deadline": {"2": 4}},
             "balanced": False, "seconds": 1}  # fmt: skip
    assert total([one]) == one
    assert total([one, other]) == {
        "samples_dropped": {"stale": 12, "deadline": 4},
        "dropped_lengths": {"stale": {"4": 11, "8": 1}, "deadline": {"2": 4}}, "balanced": False, "seconds": 2.5,
    }  # fmt: skip


def test_observers_get_the_configuration_first_and_the_close_last_also_if_the_run_cannot_start(tmp_path: Path) -> None:
    seen: list[object] = []

    def before(prepared: Prepared) -> None:
        prepared.catalogue.observe("mine", seen.append)

    _, raised, _ = conducted(tmp_path, {"actor": until_told}, InfrastructureError("no machine"), before=before)
    opened, finished, closed = seen
    assert isinstance(opened, RunOpened) and opened.config["steps"] > 0 and opened.name == "run"
    assert isinstance(finished, RunFinished) and closed == RunClosed(opened.run_dir, "failed")
    assert isinstance(raised, InfrastructureError)


@pytest.mark.parametrize(
    ("done", "stop_after_s", "seconds", "said"),
    [
        (False, None, 50.0, ["the run waits for an upload, up to 50 s", "the run ends without an upload"]),
        (False, 20.0, 20.0, ["the run waits for an upload, up to 50 s", "the run ends without an upload"]),
        (True, None, 3.0, []),
    ],
    ids=["deadline", "stop", "done"],
)
def test_a_finished_run_waits_for_work_that_an_observer_declared_until_its_deadline_or_a_stop(
    tmp_path: Path, done: bool, stop_after_s: float | None, seconds: float, said: list[str]
) -> None:
    work, declared = WorkAtEnd("an upload", 50.0), threading.Event()
    if done:
        work.done.set()

    def observer(event: object) -> WorkAtEnd | None:
        if not isinstance(event, RunOpened):
            return None
        declared.set()
        return work

    async def actor(runner: ScriptedRunner) -> None:
        assert declared.wait(60)
        await steps(runner)

    summary, raised, took = conducted(
        tmp_path,
        {"actor": actor},
        stop_after_s=stop_after_s,
        before=lambda run: run.catalogue.observe("mine", observer),
    )
    assert raised is None and summary["status"] == "finished" and seconds <= took <= seconds + 10
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["message"] for line in lines if "an upload" in line.get("message", "")] == said
