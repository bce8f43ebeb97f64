# SPDX-License-Identifier: Apache-2.0
"""The scorer with real child processes: what rewards say is summed, what they break is named, nothing becomes a zero."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from relax_core.api import Chosen, Message, Node, Outcome, Score, SystemClock, Task, Trajectory
from relax_core.api.events import RoleRecovered
from relax_core.api.role import RunStatus
from relax_core.config.run_config import RewardChoice
from relax_core.data.tasks import applies
from relax_core.rewards.host import RewardHost, ScoredSample, pack_units
from relax_core.rewards.scorer import CircuitOpen, RewardScorer
from relax_core.rpc.isolated_pool import ProcessStarter, replaced_events
from relax_core.runners.local.workers import LocalWorkers
from relax_core.runners.run_status import RunStatusService
from tests.processes import gone, kept_worker, named

REWARDS = '''
import asyncio, os, re, subprocess, time
from relax_core.api import BatchReward, Gold, GroupReward, Reward, Score, Unreadable
from tests.passing import an_hour_passes

BORN = time.monotonic()  # differs between processes

class Length(Reward):
    def score(self, task, trajectory):
        return len(trajectory.response)


class Later(Reward):
    async def score(self, task, trajectory):
        if trajectory.response == "hour":
            an_hour_passes()
        if trajectory.response in ("slow", "hour"):
            await asyncio.sleep(4000)
        return Score(2.0, {"half": 1.0}, steps=(0.5, 0.25))


class Holding(Reward):
    async def score(self, task, trajectory):
        await asyncio.sleep(0.01)
        if trajectory.response == "block":
            time.sleep(3600)
        if trajectory.response == "exit":
            os._exit(3)
        return 1.0


class Awkward(Reward):
    """Does what the response says."""

    def score(self, task, trajectory):
        word = trajectory.response
        if word == "block":
            time.sleep(3600)
        if word == "lock":
            re.match("(a+)+$", "a" * 60 + "!")
        if word == "child":
            subprocess.Popen(["sleep", "300"])
            an_hour_passes()
            time.sleep(300)
        if word == "exit":
            os._exit(3)
        if word == "hog":
            return len(bytearray(8 << 30))
        if word == "typo":
            return undefined_name
        if word == "process":
            return BORN
        return {"nan": float("nan"), "text": "good", "true": True, "none": None}.get(word, 1.0)


class Parted(Reward):
    def score(self, task, trajectory):
        return Score(2.0, {"other": 3.0, "parted": 4.0})


class Boxed(Reward):
    """One for the answer in brackets."""

    def score(self, task, trajectory):
        return float(trajectory.response == f"[{task.answer}]")

    def gold(self, task):
        return Gold(str(task.answer), (f"[{task.answer}]",))


class Ranks(GroupReward):
    def score_group(self, task, trajectories):
        order = sorted(t.response for t in trajectories)
        if "bad" in order:
            raise ValueError("a bad group")
        lost = Unreadable("no verdict", {"verdicts/unreadable": 1.0})
        return [lost if t.response == "lost" else order.index(t.response) for t in trajectories]


class Together(BatchReward):
    def score_batch(self, tasks, trajectories):
        if any(t.response == "block" for t in trajectories):
            an_hour_passes()
            time.sleep(3600)
        return [float(t.response) for t in trajectories]


class Short(BatchReward):
    async def score_batch(self, tasks, trajectories):
        return [1.0]
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "my_rewards.py"
    path.write_text(REWARDS)
    return path


@asynccontextmanager
async def scoring(
    plugin: Path,
    *choices: RewardChoice,
    num_workers: int = 1,
    run_status: RunStatus | None = None,
    functions: Mapping[str, bytes] | None = None,
) -> AsyncIterator[RewardScorer]:
    run_status = run_status or RunStatusService(SystemClock())
    children = LocalWorkers([str(plugin)])
    scorer = RewardScorer(
        choices, ProcessStarter(children, replaced_events(run_status)), SystemClock(), num_workers, functions=functions
    )
    try:
        await scorer.start()
        yield scorer
    finally:
        await scorer.stop()
        await children.close()


def choice(name: str, **fields: object) -> RewardChoice:
    return RewardChoice(chosen=Chosen("reward", name), **fields)  # type: ignore[arg-type]


def said(response: str, outcome: Outcome = Outcome.FINISHED, step_rewards: tuple[float, ...] = ()) -> Trajectory:
    nodes = (Node(None, (1, 2), False), Node(0, (3,), True, (-0.5,), (4,)))
    messages = (Message("user", "?"), Message("assistant", response))
    return Trajectory(messages, response, nodes, outcome, step_rewards, {"note": 1})


def group(*responses: str, **metadata: object) -> tuple[Task, list[Trajectory]]:
    return Task("t", "?", "a", metadata), [said(response) for response in responses]


async def scored(scorer: RewardScorer, *responses: str) -> list[ScoredSample]:
    async with asyncio.timeout(300):
        (answers,) = await scorer.score([group(*responses)])
    return answers


def test_trajectories_arrive_unchanged_at_the_reward() -> None:
    from relax_core.api import ToolCall
    from relax_core.rpc import messages

    trajectory = said("x", step_rewards=(1.0,))
    called = Message("assistant", "", (ToolCall("search", {"query": "q"}),))
    trajectory = Trajectory((*trajectory.messages, called), *(getattr(trajectory, f) for f in trajectory.__slots__[1:]))
    task, routed = (
        Task("t", "?"),
        replace(trajectory, forest=(Node(None, (1,), False, routed_experts=b"\1", routed_valid=b"\1"),)),
    )
    ((first, other),) = RewardHost().unpack(
        messages.decode(messages.encode(pack_units([[(task, trajectory), (task, routed)]])))
    )
    assert first == (task, trajectory)
    assert first[0] is other[0] and other[1].forest == (Node(None, (1,), False),)


async def test_a_tasks_own_answer_earns_the_most_of_its_forms_and_its_failures_trip_nothing(plugin: Path) -> None:
    task, broken = Task("right", "?", 7), [Task(f"broken {number}", "?", "typo") for number in range(40)]
    async with scoring(plugin, choice("length"), choice("boxed", weight=0.5)) as scorer, asyncio.timeout(300):
        assert await scorer.answers([task]) == [3.5], "[7] is longer than 7"
    async with scoring(plugin, choice("awkward")) as scorer, asyncio.timeout(300):
        assert await scorer.answers([*broken, task]) == [*[None] * 40, 1.0]
        assert [one.value for one in await scored(scorer, "7")] == [1.0]
    async with scoring(plugin, choice("ranks")) as scorer:
        assert await scorer.answers([task]) == [None], "an answer alone has no rank"
    async with scoring(plugin) as scorer:
        assert await scorer.answers([task]) == [None]


async def test_parts_of_scores_are_kept_apart_by_their_rewards(plugin: Path) -> None:
    async with scoring(plugin, choice("parted"), choice("parted", label="other")) as scorer:
        (found,) = await scored(scorer, "a")
    assert found.value == 4.0
    assert found.parts == {
        "parted": 2.0, "parted/other": 3.0, "parted/parted": 4.0, "other": 2.0, "other/other": 3.0, "other/parted": 4.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("only", "expected"),
    [("", True), ("domain=maths", True), ("domain=code", False), ("source.set=gsm", True), ("source.none=x", False)],
)
def test_only_selects_tasks_by_a_path_into_their_columns(only: str, expected: bool) -> None:
    assert applies(only, Task("t", "?", metadata={"domain": "maths", "source": {"set": "gsm"}})) is expected


def test_otherwise_selects_the_tasks_that_no_other_reward_names() -> None:
    task, others = Task("t", "?", metadata={"domain": "maths"}), ("domain=code", "", "otherwise")
    assert applies("otherwise", task, others)
    assert not applies("otherwise", task, (*others, "domain=maths"))


async def test_rewards_are_weighed_summed_and_kept_by_name(plugin: Path) -> None:
    async with scoring(plugin, choice("length", weight=0.5), choice("later", weight=2.0)) as scorer:
        ((one, two),) = await scorer.score([(group()[0], [said("ab"), said("abcd", step_rewards=(1.0, 1.0, 3.0))])])
    assert one == ScoredSample(5.0, {"length": 2.0, "later": 2.0, "later/half": 1.0}, (1.0, 0.5))
    assert two.value == 5.0 + 2.0 + 4.0
    assert two.parts["environment"] == 5.0
    assert two.steps == (2.0, 1.5, 3.0)


async def test_a_reward_judges_only_the_tasks_it_applies_to(plugin: Path) -> None:
    async with scoring(plugin, choice("length", only="domain=maths"), choice("later", only="domain=code")) as scorer:
        maths, code, none = await scorer.score(
            [group("abc", domain="maths"), group("abc", domain="code"), group("abc", domain="art")]
        )
    assert (maths[0].value, dict(maths[0].parts)) == (3.0, {"length": 3.0})
    assert code[0].value == 2.0
    assert none[0].outcome is Outcome.INVALID_TASK
    assert math.isnan(none[0].value)


async def test_a_reward_judges_the_tasks_that_no_other_reward_judges(plugin: Path) -> None:
    async with scoring(plugin, choice("length", only="domain=maths"), choice("later", only="otherwise")) as scorer:
        maths, code = await scorer.score([group("abc", domain="maths"), group("abc", domain="code")])
    assert [(one.value, "later" in one.parts) for one in (*maths, *code)] == [(3.0, False), (2.0, True)]


async def test_without_rewards_the_environment_judges(plugin: Path) -> None:
    whole = replace(said("z", step_rewards=(0.5, 2.0)), step_turns=(-1, 1))
    async with scoring(plugin) as scorer:
        ((won, lost, other),) = await scorer.score(
            [(group()[0], [said("x", step_rewards=(0.0, 1.0)), said("y"), whole])]
        )
        ((only,),) = await scorer.score([(group()[0], [replace(whole, step_turns=(-1, -1))])])
    assert (won.value, won.steps, lost.value) == (1.0, (0.0, 1.0), 0.0)
    assert (other.value, other.steps, other.parts) == (2.5, (0.0, 2.0), {"environment": 2.5})
    assert (only.value, only.steps, only.parts) == (2.5, (), {"environment": 2.5}), "both are for the whole sample"


async def test_attempts_that_failed_before_are_not_scored_and_a_failed_group_fails_whole_and_alone(
    plugin: Path,
) -> None:
    async with scoring(plugin, choice("ranks")) as scorer:
        members = [said("b"), said("bad", Outcome.ENGINE_ERROR), said("a", Outcome.TRUNCATED)]
        ((first, failed, cut),) = await scorer.score([(group()[0], members)])
        good, bad = await scorer.score([group("b", "a"), group("x", "bad")])
    assert (first.value, cut.value, cut.outcome) == (1.0, 0.0, Outcome.TRUNCATED)
    assert failed.outcome is Outcome.ENGINE_ERROR
    assert math.isnan(failed.value)
    assert [one.value for one in good] == [1.0, 0.0]
    assert [one.outcome for one in bad] == [Outcome.REWARD_ERROR] * 2


async def test_a_sample_of_a_group_without_a_verdict_fails_alone(plugin: Path) -> None:
    async with scoring(plugin, choice("ranks")) as scorer:
        ((first, lost, last),) = await scorer.score([group("b", "lost", "a")])
    assert [first.value, last.value] == [1.0, 0.0]
    assert lost.outcome is Outcome.REWARD_UNREADABLE and math.isnan(lost.value)
    assert lost.error == "reward ranks: no verdict" and lost.parts == {"ranks/verdicts/unreadable": 1.0}


async def test_bad_numbers_exceptions_and_a_process_that_ends_are_outcomes_of_their_samples(plugin: Path) -> None:
    async with scoring(plugin, choice("awkward")) as scorer:
        nan, text, none, true = await scored(scorer, "nan", "text", "none", "true")
        good, bad = await scored(scorer, "fine", "typo")
        ended = await scored(scorer, "a", "exit", "b")
    assert [nan.outcome, text.outcome, none.outcome] == [Outcome.REWARD_INVALID] * 3
    assert all(math.isnan(one.value) for one in (nan, text, none))
    assert "'good'" in text.error or "good (str)" in text.error
    assert true.value == 1.0
    line = next(n for n, text in enumerate(REWARDS.splitlines(), 1) if "return undefined_name" in text)
    assert good.value == 1.0
    assert bad.outcome is Outcome.REWARD_ERROR
    assert f"{plugin}:{line}" in bad.error
    assert "return undefined_name" in bad.frames
    assert "rewards/host" not in bad.frames
    assert "rpc/host" not in bad.frames
    assert [a.outcome for a in ended] == [Outcome.FINISHED, Outcome.REWARD_ERROR, Outcome.FINISHED]
    assert "its process ended twice" in ended[1].error


async def test_a_reward_that_never_returns_is_killed_and_only_its_sample_is_lost(plugin: Path) -> None:
    async with scoring(plugin, choice("awkward", timeout_s=1.0)) as scorer:
        process = kept_worker("reward-awkward-0")
        answers = await scored(scorer, "a", "process", "b", "lock", "c", "process")
        assert gone(process)
    assert [a.outcome for a in answers] == [Outcome.FINISHED] * 3 + [Outcome.REWARD_TIMEOUT] + [Outcome.FINISHED] * 2
    assert math.isnan(answers[3].value)
    assert answers[1].value != answers[5].value


async def test_a_killed_reward_leaves_no_children(plugin: Path) -> None:
    async with scoring(plugin, choice("awkward", timeout_s=60.0)) as scorer:
        (answer,) = await scored(scorer, "child")
        assert answer.outcome is Outcome.REWARD_TIMEOUT
        async with asyncio.timeout(60):
            while named("sleep"):
                await asyncio.sleep(0.01)


async def test_a_slow_awaitable_times_out_alone_while_the_others_finish(plugin: Path) -> None:
    async with scoring(plugin, choice("later", timeout_s=60.0)) as scorer:
        answers = await scored(scorer, "a", "hour", "b")
    assert [a.outcome for a in answers] == [Outcome.FINISHED, Outcome.REWARD_TIMEOUT, Outcome.FINISHED]


async def test_a_slow_awaitable_does_not_delay_other_samples(plugin: Path) -> None:
    async with scoring(plugin, choice("later", timeout_s=200)) as scorer:
        slow = asyncio.create_task(scored(scorer, "a", "slow"))
        while not scorer.unanswered():
            await asyncio.sleep(0)
        for _ in range(3):
            assert [a.value for a in await scored(scorer, "b", "c")] == [2.0, 2.0]
        assert not slow.done()
        slow.cancel()


async def test_an_awaitable_that_holds_its_process_is_found_among_batches_side_by_side(plugin: Path) -> None:
    async with scoring(plugin, choice("holding", timeout_s=1.0)) as scorer:
        answers = await asyncio.gather(*(scored(scorer, "a", word) for word in ("b", "block", "c", "exit", "d")))
    outcomes = [[one.outcome for one in pair] for pair in answers]
    fine, late, dead = Outcome.FINISHED, Outcome.REWARD_TIMEOUT, Outcome.REWARD_ERROR
    assert outcomes == [[fine, fine], [fine, late], [fine, fine], [fine, dead], [fine, fine]]


async def test_a_reward_over_its_memory_is_named_and_the_rest_is_scored(plugin: Path) -> None:
    async with scoring(plugin, choice("awkward", memory_mb=2048)) as scorer:
        answers = await scored(scorer, "a", "hog", "b")
    assert [a.outcome for a in answers] == [Outcome.FINISHED, Outcome.REWARD_ERROR, Outcome.FINISHED]
    assert "MemoryError" in answers[1].error


async def test_a_process_killed_from_outside_costs_nothing_and_its_successor_is_an_event(plugin: Path) -> None:
    run_status = RunStatusService(SystemClock())
    async with scoring(plugin, choice("awkward"), run_status=run_status) as scorer:
        os.kill(kept_worker("reward-awkward-0"), signal.SIGKILL)
        answers = await scored(scorer, "a", "b")
    assert [a.value for a in answers] == [1.0, 1.0]
    ((_, event),) = await run_status.events(0, 0.0)
    assert isinstance(event, RoleRecovered) and event.role == "reward-awkward-0"
    assert event.detail.startswith("its process was replaced: ") and "status -9" in event.detail


async def test_a_failing_batch_is_halved_until_only_the_faulty_sample_fails(plugin: Path) -> None:
    async with scoring(plugin, choice("together", timeout_s=60.0)) as scorer:
        answers = await scored(scorer, "1", "2", "x", "4", "block")
    assert [a.outcome.value for a in answers] == ["finished", "finished", "reward_error", "finished", "reward_timeout"]
    assert [a.value for a in answers if a.outcome.judged] == [1.0, 2.0, 4.0]


async def test_a_batch_of_the_wrong_length_is_the_authors_error(plugin: Path) -> None:
    async with scoring(plugin, choice("short")) as scorer:
        answers = await scored(scorer, "1", "2")
    assert [a.outcome for a in answers] == [Outcome.FINISHED] * 2  # halved to batches of one, which it can do


async def test_overlapping_calls_share_the_processes(plugin: Path) -> None:
    async with scoring(plugin, choice("length"), num_workers=2) as scorer:
        calls = [scorer.score([group(*["x" * (n + m) for m in range(4)])]) for n in range(16)]
        answers = await asyncio.gather(*calls)
    assert [[a.value for a in one] for (one,) in answers] == [[float(n + m) for m in range(4)] for n in range(16)]


async def test_a_function_travels_from_python(plugin: Path) -> None:
    wanted = "yes"
    function = cloudpickle.dumps(lambda task, trajectory: Score(float(trajectory.response == wanted)))
    async with scoring(plugin, choice("mine"), functions={"mine": function}) as scorer:
        yes, no = await scored(scorer, "yes", "no")
    assert (yes.value, no.value) == (1.0, 0.0)


async def test_a_typo_opens_the_circuit_and_hands_over_a_failing_sample(plugin: Path) -> None:
    async with scoring(plugin, choice("awkward")) as scorer:
        with pytest.raises(CircuitOpen) as caught:
            await scorer.score([group(*["typo"] * 16), group(*["typo"] * 16)])  # one group alone may be odd
        with pytest.raises(CircuitOpen):
            await scored(scorer, "fine")
    assert caught.value.exit_code == 3
    assert str(plugin) in str(caught.value)
    assert "undefined_name" in caught.value.frames
    assert caught.value.sample["response"] == "typo"
    assert caught.value.sample["task"]["answer"] == "a"


async def test_a_missing_reward_stops_the_start(plugin: Path) -> None:
    with pytest.raises(Exception, match="nothing-like-it"):
        async with scoring(plugin, choice("nothing-like-it")):
            pass


async def test_stopping_fails_open_calls(plugin: Path) -> None:
    async with scoring(plugin, choice("awkward", timeout_s=300)) as scorer:
        waiting = asyncio.ensure_future(scorer.score([group("block")]))
        await asyncio.sleep(0)
        await scorer.stop()
        with pytest.raises(Exception, match="was stopped"):
            await waiting
