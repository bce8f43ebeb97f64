# SPDX-License-Identifier: Apache-2.0
"""The scaling policy of a run: fed from heartbeats in a live run, and from recorded signals by `relax autoscale`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_scaling import answers
from relax_plugin_scaling.answers import (
    autoscaler_conditions,
    autoscaler_health,
    autoscaler_status,
    enable,
    scale_history,
)
from relax_plugin_scaling.autoscaler import Autoscaler
from relax_plugin_scaling.replay import recorded_signals
from typer.testing import CliRunner

from relax_core.api import Proposal, ScalingPolicy, Signals
from relax_core.api.errors import ConfigError
from relax_core.api.events import EnginesMeasured, Logged, StepFinished
from relax_core.api.role import Heartbeat
from relax_core.api.run_commands import Autoscale, Command, ScaleRequest, Stop
from relax_core.api.scaling_limits import ScalingLimits
from relax_core.cli.main import app
from relax_core.config.run_config import to_toml
from relax_core.control.prepare import Prepared
from relax_core.engines.scaling import PoolScaling
from relax_core.observe.event_log import EventLog
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory
from relax_core.registry.catalogue import Catalogue
from relax_core.testing.scaling_policy import BUSY, EVEN
from relax_core.views.run import RunHealth, RunView
from tests.unit.control.conftest import configured
from tests.unit.control.test_conduct import Life, ScriptedRunner, conducted, listener

PLACED = {"placement": {"mode": "hybrid"}}
UTILIZATION = {"autoscale": {"name": "target-utilization", "max_engines": 4, "out_cooldown_s": 60.0}, **PLACED}
LIMITS = ScalingLimits(max_engines=4, out_cooldown_s=20.0)


def loaded(running: int, seconds: float) -> Life:
    """A rollout with one engine of four slots, which sends heartbeats for a time."""

    async def generates(runner: ScriptedRunner) -> None:
        engine = {"serving": True, "running": running, "kv_capacity": 0, "kv_running": 0}
        queue = {
            "waiting": 0,
            "oldest_wait_s": 0.0,
            "requests_per_engine": 4,
            "scored": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "drafted_tokens": 0,
            "kept_drafts": 0,
        }
        for _ in range(int(seconds * 2)):
            facts = {"engines": {"engine-0": engine}, "scheduling": queue}
            await runner.run_status.heartbeat(Heartbeat("rollout", "busy", facts=facts))
            await asyncio.sleep(0.5)

    return generates


async def saves(runner: ScriptedRunner) -> None:
    await asyncio.sleep(65.0)


async def a_step(runner: ScriptedRunner) -> None:
    await asyncio.sleep(95.0)
    await runner.run_status.emit(StepFinished(1, {"reward/mean": 0.5}))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def test_a_run_records_its_signals_and_what_the_policy_proposes(tmp_path: Path) -> None:
    summary, raised, _ = conducted(tmp_path, {"rollout": loaded(4, 100.0), "actor": a_step}, **UTILIZATION)
    assert (summary["status"], raised) == ("finished", None)
    recorded = lines(tmp_path, "events.jsonl")
    windows = [record["signals"] for record in recorded if record["event"] == "engines measured"]
    assert len(windows) >= 9
    assert {(signals["serving"], signals["slot_use"], signals["busy"]) for signals in windows} == {(1, 1.0, 1.0)}
    proposed = [record for record in recorded if record["event"] == "scaling proposed"]
    assert [(one["size"], one["wanted"], one["target"], one["held_by"]) for one in proposed] == [
        (1, 2, None, "out_cooldown_s = 60"), (1, 2, 2, ""), (1, 2, None, "out_cooldown_s = 60")
    ]  # fmt: skip
    assert all(one["reason"].startswith("use 1.00 is above high = 0.85 for ") for one in proposed)
    (step,) = [record for record in lines(tmp_path, "metrics.jsonl") if record["step"] == 1]
    assert (step["engines/serving"], step["engines/slot_use"], step["engines/waiting"]) == (1.0, 1.0, 0.0)


def beside(first: Life, second: Life) -> Life:
    """Two lives of one role at once."""

    async def both(runner: ScriptedRunner) -> None:
        await asyncio.gather(first(runner), second(runner))

    return both


def test_a_proposal_within_the_limits_is_sent_to_the_rollout_once(tmp_path: Path) -> None:
    """Proposals that a limit stops are not sent, and nothing is sent in a run that stops."""
    heard: list[tuple[str, Command]] = []
    busy = beside(loaded(4, 65.0), listener("rollout", heard))
    layer = {**UTILIZATION, "autoscale": {**UTILIZATION["autoscale"], "out_cooldown_s": 0.0, "out_hold_s": 20.0}}
    summary, raised, _ = conducted(tmp_path, {"rollout": busy, "actor": saves}, stop_after_s=45.0, **layer)
    assert (summary["status"], raised) == ("stopped", None)
    sent = [command for _, command in heard if isinstance(command, ScaleRequest)]
    wanted = [one for one in lines(tmp_path, "events.jsonl") if one["event"] == "scaling proposed"]
    assert sent == [ScaleRequest(sent[0].key, "rollout", 2, keep_partial=True)]
    assert [one["target"] for one in wanted] == [2]
    assert [command for _, command in heard] == [*sent, Stop()]


def test_a_proposal_that_a_limit_stops_is_not_sent(tmp_path: Path) -> None:
    heard: list[tuple[str, Command]] = []
    busy = beside(loaded(4, 50.0), listener("rollout", heard))
    conducted(tmp_path, {"rollout": busy, "actor": listener("actor", [])}, stop_after_s=55.0, **UTILIZATION)
    wanted = [one for one in lines(tmp_path, "events.jsonl") if one["event"] == "scaling proposed"]
    assert [one["target"] for one in wanted] == [None]
    assert [command for _, command in heard] == [Stop()]


def test_a_policy_is_turned_off_and_on_and_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, Command]] = []

    async def switches(runner: ScriptedRunner) -> None:
        run = RunDirectory(tmp_path / "run")
        run.send(Autoscale(False))
        await asyncio.sleep(65.0)
        seen.append(autoscaler_status(RunView(run.path), 0.0))
        run.send(Autoscale(True))

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(answers, "health", lambda *_: RunHealth("running"))
    busy = beside(loaded(4, 65.0 + 45.0), beside(listener("rollout", heard), switches))
    layer = {**UTILIZATION, "autoscale": {**UTILIZATION["autoscale"], "out_cooldown_s": 0.0, "out_hold_s": 20.0}}

    def write(prepared: Prepared) -> None:
        prepared.directory.write_config(to_toml(prepared.config.dump()))

    lives = {"rollout": busy, "actor": listener("actor", [])}
    conducted(tmp_path, lives, stop_after_s=110.0, before=write, **layer)
    assert [type(command) for _, command in heard] == [ScaleRequest, Stop]
    view = RunView(tmp_path / "run")
    after = autoscaler_status(view, 0.0)
    assert (seen[0]["enabled"], seen[0]["last_decision"], after["enabled"]) == (False, None, True)
    assert (after["last_decision"]["target"], after["recent_metrics"]["slot_use"], after["max_engines"]) == (2, 1.0, 4)
    assert autoscaler_health(view, 0.0) == {"status": "healthy", "enabled": True, "service": "autoscaler"}
    assert autoscaler_conditions(view, 0.0)["conditions"]["proposal"]["wanted"] == 2
    assert enable(view, False, 0.0)["status"] == "ok"
    assert RunDirectory.open(view.path).take_commands() == [Autoscale(False)]
    pool = PoolScaling("rollout", ["engine-0"], 1)
    request = next(command for _, command in heard if isinstance(command, ScaleRequest))
    pool.ask(request, 5.0)
    monkeypatch.setattr(answers, "scaling_of", lambda _: {"rollout": pool})
    (change,) = scale_history(view)["history"]
    assert (change["action"], change["from_engines"], change["to_engines"]) == ("scale_out", 1, 2)
    assert change["completed_at"] is None and change["reason"].startswith("use 1.00 is above high")
    assert scale_history(view, action="scale_in")["history"] == []
    for wrong in ({"action": "sideways"}, {"limit": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: got"):
            scale_history(view, **wrong)
    monkeypatch.setattr(answers, "health", lambda *_: RunHealth("finished"))
    with pytest.raises(ConfigError, match="which is finished; turn the policy of a live run"):
        enable(view, True, 0.0)


def test_without_a_policy_a_run_records_only_its_signals(tmp_path: Path) -> None:
    conducted(tmp_path, {"rollout": loaded(4, 40.0), "actor": a_step}, **PLACED)
    recorded = [record["event"] for record in lines(tmp_path, "events.jsonl")]
    assert "engines measured" in recorded and "scaling proposed" not in recorded


class Wanting(ScalingPolicy):
    """Proposes a number in each window; raises it if it is an error."""

    def __init__(self, *numbers: Any) -> None:
        self.numbers = numbers

    def start(self):
        return 0

    def decide(self, state, signals, now):
        number = self.numbers[min(state, len(self.numbers) - 1)]
        if isinstance(number, Exception):
            raise number
        return state + 1, number and Proposal(number, "wanted")


def decided(scaler: Autoscaler, windows: int) -> list[Any]:
    state, found = scaler.start(), []
    for number in range(windows):
        state, event = scaler.decide(state, replace(EVEN, serving=2, at=10.0 * number), 10.0 * number)
        found.append(getattr(event, "target", event) if event else "")
    return found


def test_a_stopped_proposal_is_told_once_until_it_changes() -> None:
    scaler = Autoscaler(Wanting(9, 9, 9, 9, 9, None, 9, 8), LIMITS.model_copy(update={"max_engines": 2}))
    assert decided(scaler, 10) == ["", None, "", "", "", "", "", None, None, ""]


def test_a_policy_that_raises_is_off_and_the_run_goes_on() -> None:
    scaler = Autoscaler(Wanting(None, ZeroDivisionError("no window")), LIMITS)
    found = decided(scaler, 6)
    assert found[:2] == ["", ""] and found[3:] == ["", "", ""]
    assert isinstance(found[2], Logged) and found[2].level == "error"
    assert "the scaling policy is off" in found[2].message and "ZeroDivisionError: no window" in found[2].message


def test_a_policy_with_an_invalid_proposal_is_off() -> None:
    found = decided(Autoscaler(Wanting(0.5), LIMITS), 4)
    assert "want None, or a Proposal with a target of at least 1" in found[1].message and found[2:] == ["", ""]


# -- replay ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run directory with six windows of an even load and six of a high load; the run had no policy."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text(to_toml(configured(Catalogue.load(), **PLACED).dump()))
    wall = iter(range(1_000_000, 2_000_000, 10))
    log = EventLog(path, Redactor({}), wall=lambda: float(next(wall)))
    for number, load in enumerate([EVEN] * 6 + [BUSY] * 6):
        log.write(EnginesMeasured(replace(load, serving=1, at=float(number % 5)).plain()))  # the run's clock restarts
    log.close()
    return path


@pytest.fixture
def relax() -> Iterator[Callable[..., str]]:
    def call(*arguments: str | Path) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.stdout

    yield call


def test_a_policy_is_replayed_on_a_recorded_run(relax, recorded: Path) -> None:
    at = ("autoscale", recorded, "autoscale=target-utilization")
    found = json.loads(relax(*at, "--json"))
    assert (found["schema"], found["policy"], found["windows"]) == ("relax.autoscale/1", "target-utilization", 12)
    assert [(one["seconds"], one["size"], one["wanted"], one["target"]) for one in found["proposals"]] == [
        (90.0, 1, 10, 5), (100.0, 1, 10, None)
    ]  # fmt: skip
    assert found["proposals"][0]["held_by"] == "max_joining = 4"
    table = relax(*at)
    assert "target-utilization on 12 windows of run in 110 s; the recorded run did not obey the policy" in table
    assert "max_joining = 4" in table and "use 0.99 is above high" not in table and "use 1.00 is above high" in table
    calm = relax(*at, "autoscale.waiting_per_engine=1000", "autoscale.high=1.0", "autoscale.oldest_wait_s=600")
    assert "no proposal: the policy keeps the number of engines" in calm


def test_a_replay_needs_a_policy_and_signals(relax, recorded: Path) -> None:
    with pytest.raises(ConfigError, match=r"autoscale: got nothing; name a scaling policy, such as autoscale=balance"):
        relax("autoscale", recorded)
    (recorded / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"RUN: got .*its events.jsonl has no engine signals"):
        relax("autoscale", recorded, "autoscale=balance")


def test_signals_of_a_restarted_run_are_in_the_order_of_the_wall_clock(recorded: Path) -> None:
    records = [json.loads(line) for line in (recorded / "events.jsonl").read_text().splitlines()]
    found = list(recorded_signals(records))
    assert [signals.at - found[0].at for signals in found] == [10.0 * number for number in range(12)]
    assert replace(found[0], at=0.0) == replace(EVEN, serving=1)
    assert isinstance(found[0], Signals)
