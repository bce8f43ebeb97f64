# SPDX-License-Identifier: Apache-2.0
"""Odd values of authors' code are charged to the sample or to the author by name, never to the role that reads them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from relax_plugin_media.host import MediaHost
from relax_plugin_workbench.data_survey import DataFile, survey
from relax_plugin_workbench.memory import estimated

from relax_core import learn
from relax_core.api import (
    Algorithm,
    AttemptId,
    Chosen,
    ChunkPlan,
    Environment,
    Filter,
    Manifest,
    Media,
    Message,
    ModalityProcessor,
    Outcome,
    Ragged,
    RowBatch,
    RowId,
    Sampler,
    Sealed,
    SystemClock,
    Task,
    TaskSource,
    Tool,
    Trainer,
    Trajectory,
    Version,
    WeightTransport,
)
from relax_core.api.bus import Issue
from relax_core.api.component import Configurable
from relax_core.api.errors import PluginError
from relax_core.config.run_config import EnvironmentChoice, RewardChoice
from relax_core.data.tasks import TaskSet
from relax_core.engine_kit.model_weights import received
from relax_core.engines.engine_state import EngineState, EngineStatus
from relax_core.engines.model_client import PoolModelClient
from relax_core.engines.model_rpc import model_handlers
from relax_core.engines.requests import SAMPLING, PendingRequest
from relax_core.engines.router import Quarantine, RequestLimits, Router
from relax_core.learn.groups import credited
from relax_core.observe.spans import Unwatched
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import RewardScorer
from relax_core.roles.rank_group import RankGroup
from relax_core.rpc import messages
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.inline import InlineWorkers
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import InProcess, Limits, SingleTurn, run_answers, run_episode
from relax_core.sampling.groups import InflightGroup, Selection
from relax_core.sampling.tools import check_tools
from tests.odd_inputs import authors
from tests.odd_inputs.authors import value
from tests.unit.sampling.toy_policy import Letters, Script, answering, completion, play

TABLE = tomllib.loads((Path(__file__).parent / "returned.toml").read_text())
PROMPT = (Message("user", "go"),)


def entries(kind: str) -> Any:
    keys = ("says", "ok", "outcome", "in_process_only", "ignore_case")
    return pytest.mark.parametrize(
        "entry", TABLE[kind], ids=lambda entry: ", ".join(str(v) for k, v in entry.items() if k not in keys)[:60]
    )


class Builder:
    """Builds the components of `authors` by class name."""

    def build(self, chosen: Chosen) -> Configurable:
        return getattr(authors, chosen.name)()  # type: ignore[no-any-return]


def odd(entry: dict[str, Any]) -> Task:
    return Task("t", PROMPT, "x", {key: text for key, text in entry.items() if key not in ("says", "ok", "outcome")})


def check_says(entry: dict[str, Any], text: str) -> None:
    shown = text.lower() if entry.get("ignore_case") else text
    assert all(part in shown for part in entry["says"]), text


@asynccontextmanager
async def isolated(name: str) -> AsyncIterator[EnvironmentPool]:
    """The pool's path through a host, with all values encoded and decoded, but without a process."""
    workers = InlineWorkers(Builder())
    choice = EnvironmentChoice(chosen=Chosen("environment", name), timeout_s=30.0)
    pool = EnvironmentPool(choice, ProcessStarter(workers), build=Builder().build)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()
        await workers.close()


async def check_environment(name: str, entry: dict[str, Any]) -> None:
    script, task = ("a", "b", "c"), odd(entry)
    made: Environment = getattr(authors, name)()
    found = [await play(InProcess(made, 30.0), Script(*script), task)]
    if not entry.get("in_process_only"):
        async with isolated(name) as pool:
            found.append(await pool.play(lambda environment: play(environment, Script(*script), task)))
    for trajectory in found:
        if entry.get("ok"):
            assert trajectory.outcome is Outcome.FINISHED, trajectory.info
            assert set(map(type, trajectory.step_rewards)) <= {float}
        else:
            assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
            check_says(entry, trajectory.info["error"])


@entries("environment")
async def test_an_environment_fails_its_own_sample(entry: dict[str, Any]) -> None:
    await check_environment("OddEnvironment", entry)


@entries("driven")
async def test_a_driven_sample_fails_alone(entry: dict[str, Any]) -> None:
    await check_environment("OddDriver", entry)


HALVES = (
    'Observation("a\\ud83d")', 'Observation(messages=(Message("tool", "a\\ud83d", name="b\\ud83d"),))',
    'Observation(messages=(Message("user", (Part("a\\ud83d"),)),))',
)  # fmt: skip


@pytest.mark.parametrize("observation", HALVES)
async def test_half_of_a_character_reaches_neither_rewards_nor_logs(observation: str) -> None:
    task = Task("t", PROMPT, "x", {"reset": observation})
    alone = await play(InProcess(authors.OddEnvironment(), 30.0), Script("a"), task)
    assert alone.outcome is Outcome.FINISHED and alone.messages[1].text == "a\ufffd"
    assert messages.decode(messages.encode(alone.messages)) == alone.messages
    async with isolated("OddEnvironment") as pool:
        apart = await pool.play(lambda environment: play(environment, Script("a"), task))
    assert apart.outcome is Outcome.ENVIRONMENT_ERROR and "half of a surrogate pair" in apart.info["error"]


class Fragile(Letters):
    """A family that can't read what the policy wrote."""

    def parse(self, tokens: Any, tools: Any = (), before: Any = ()) -> Any:
        raise AttributeError("no such token")


async def test_text_of_the_policy_can_end_only_its_own_sample() -> None:
    family, task = Fragile(), Task("t", PROMPT)
    prompt, generate = family.start(PROMPT), answering(Script("a", "b"))
    alone = await run_episode(task, prompt, 1, InProcess(SingleTurn(), 0.0), family, generate, Limits(9))
    (together,) = await run_answers(task, prompt, (1,), (SAMPLING,), family, generate, Limits(9), list)
    for trajectory in (alone, together):
        assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and "no such token" in trajectory.info["error"]


@pytest.mark.parametrize(
    ("fails", "ended"),
    [(lambda partial: partial.nothing, []), (lambda partial: partial.text and partial.nothing, [True])],
)
async def test_a_callback_that_fails_before_or_during_a_turn_ends_the_sample_and_not_the_engine(
    fails: Any, ended: list[bool]
) -> None:
    class Listener(Environment):
        async def run(self, task: Task, seed: int, session: Any) -> None:
            await session.generate(on_partial=fails)
            await session.generate()

    watched: list[bool] = []

    async def policy(call: PendingRequest) -> Any:
        watched.append(call.watch is not None and call.watch([97]))
        return completion("a")

    trajectory = await play(InProcess(Listener(), 30.0), policy)
    assert watched == ended
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR and "nothing" in trajectory.info["error"]


@entries("reward")
async def test_a_reward_fails_the_samples_that_it_judged(entry: dict[str, Any]) -> None:
    form = next(name for name in ("sample", "group", "batch") if name in entry)
    name = {"sample": "OddReward", "group": "OddGroupReward", "batch": "OddBatchReward"}[form]
    workers = InlineWorkers(Builder())
    scorer = RewardScorer(
        [RewardChoice(chosen=Chosen("reward", name), timeout_s=30.0)], ProcessStarter(workers), SystemClock()
    )
    trajectories = [Trajectory((*PROMPT, Message("assistant", text)), text, ()) for text in ("a", "b")]
    try:
        await scorer.start()
        ((one, other),) = await scorer.score([(odd(entry), trajectories)])
    finally:
        await scorer.stop()
        await workers.close()
    for scored in (one, other):
        if entry.get("ok"):
            assert scored.outcome is Outcome.FINISHED and math.isfinite(scored.value) and type(scored.value) is float
        else:
            assert scored.outcome == entry["outcome"] and math.isnan(scored.value)
            check_says(entry, scored.error)


class OddSampler(Sampler):
    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def pick(self, group: int, num_tasks: int, seed: int) -> Any:
        return value(self._entry["pick"]) if "pick" in self._entry else 0

    def learned(self, group: int, task: int, rewards: Any) -> None:
        if "learned" in self._entry:
            value(self._entry["learned"])

    def state(self) -> Any:
        return value(self._entry.get("state", "{}"))


class OddFilter(Filter):
    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def reject(self, task: Any, attempts: Any, trajectories: Any, rewards: Any) -> Any:
        return value(self._entry["reject"]) if "reject" in self._entry else ""


@contextmanager
def charged(entry: dict[str, Any]) -> Iterator[None]:
    if entry.get("ok"):
        yield
        return
    with pytest.raises(PluginError) as caught:
        yield
    assert caught.value.exit_code == 3
    check_says(entry, str(caught.value))


class Store:
    """The part of a bus that keeps the state of a sampler."""

    async def statistics(self) -> dict[str, int]:
        return {"oldest_group": 7, "oldest_open": 7}

    async def keep(self, name: str, kept: Any) -> None:
        pass


@entries("sampler")
async def test_samplers_and_filters_are_named(entry: dict[str, Any]) -> None:
    tasks: Any = [Task(str(number), "x") for number in range(4)]
    issue = Issue(7, (AttemptId(7, 0, 0),))
    group = InflightGroup(issue, tasks[0], Version("actor", 0, 0), None)  # type: ignore[arg-type]
    group.trajectories, group.scores = (Trajectory((), "", ()),), (ScoredSample(1.0),)
    with charged(entry):
        selection = Selection(OddSampler(entry), {"odd": OddFilter(entry)}, tasks, range(4), 0, 0)
        selection.task(7)
        selection.take([group])
        await selection.keep(Store())  # type: ignore[arg-type]


def rows() -> RowBatch:
    """Five rows of 14 tokens, of two groups with two and three samples."""
    ids = [RowId(*key) for key in ((4, 0, 0, 0), (4, 1, 0, 0), (4, 1, 0, 1), (9, 0, 0, 0), (9, 1, 0, 0))]
    lengths = np.array([3, 2, 2, 4, 3])
    columns = {"tokens": Ragged(np.arange(14, dtype=np.int32), lengths)}
    mask = np.ones(14, np.uint8)
    mask[[0, 3, 5, 7, 11]] = 0
    columns["loss_mask"] = Ragged(mask, lengths)
    return RowBatch(tuple(ids), columns)


class OddAlgorithm(Algorithm):
    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def advantages(self, groups: Any) -> Any:
        return value(self._entry["advantages"])

    def loss(self, batch: Any, policy: Any) -> Any:
        return value(self._entry["loss"])


@entries("algorithm")
def test_algorithms_are_named(entry: dict[str, Any]) -> None:
    algorithm = OddAlgorithm(entry)
    if "loss" in entry:
        batch = learn.PackedBatch(rows())
        with charged(entry), learn.charged_to(algorithm):
            learn.reduce(algorithm.loss(batch, None), batch, learn.Denominators({"tokens": 14.0}))
        return
    keys = [(4, 0, 0), (4, 1, 0), (9, 0, 0), (9, 1, 0), (9, 2, 0)]
    samples = {AttemptId(*key): Sealed(AttemptId(*key), 1, Outcome.FINISHED, 1.0, trained_tokens=1) for key in keys}
    with charged(entry):
        credited(algorithm, rows(), samples, ())


class OddSource(TaskSource):
    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def open(self, path: str, columns: Any) -> None: ...

    def __len__(self) -> Any:
        return value(self._entry.get("length", "1"))

    def __getitem__(self, index: int) -> Any:
        return value(self._entry["row"])


@entries("source")
def test_task_sources_are_named_by_a_run_and_by_a_check_of_the_data(entry: dict[str, Any]) -> None:
    family: Any = SimpleNamespace(foreign_tokens={}, placeholders={})
    with charged(entry):
        task = TaskSet(OddSource(entry), family, check=False)[0]
        assert isinstance(task.prompt, str | tuple)
    if "row" in entry and not entry.get("ok"):
        (bad,) = survey(DataFile("odd", OddSource(entry), None)).bad
        check_says(entry, bad.reason)
        assert bad.where == "row 0"


class OddTrainer(Trainer):
    """A rank in this process, and the trainer whose instance plans in the role."""

    name, pid, host = "rank-0", 1, "127.0.0.1"
    start = begin_update = accumulate = finish_update = forward = publish = save = load = export = None  # type: ignore[assignment]

    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def plan(self, lengths: Any, world_size: int, tokens_per_micro_batch: int = 0) -> Any:
        return value(self._entry["plan"]) if "plan" in self._entry else ChunkPlan(((tuple(range(len(lengths))),),))

    def estimate(self, spec: Any, work: Any) -> Any:
        return value(self._entry["estimate"])

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        given = rows()
        column = Ragged(np.zeros(14, np.float32), given.columns["tokens"].lengths)
        return value(self._entry[method], rows=given, column=column)


@entries("trainer")
async def test_trainers_and_their_transports_are_named(entry: dict[str, Any]) -> None:
    trainer: Any = OddTrainer(entry)
    version, transport = Version("actor", 0, 1), Chosen("weight-transport", "odd")
    with charged(entry):
        group = RankGroup(trainer, [trainer], [Unwatched()], value(entry.get("start", "{}")), 0)
        group._offloads = ("weights",)
        if "forward" in entry:
            found = await group.forward(rows(), ("log_probs",))
            assert len(found["log_probs"]) == 5
        elif "finish_update" in entry:
            await group.finish_update({})
        elif "publish" in entry:
            await group.publish(version, transport, "here")
        elif "transfer" in entry:
            await group.call("transfer", None, transport, 1, 1.0)
        elif "offload" in entry:
            await group.offload(("weights",))
        elif "estimate" in entry:
            estimated(trainer, None, None)
        else:
            group.chunk(rows())


class OddTransport(WeightTransport):
    send = release = None  # type: ignore[assignment]

    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def receive(self, manifest: Any, resident: Any = None) -> Any:
        return value(self._entry["receive"])


@entries("transport")
def test_weight_transports_are_named_where_their_tensors_arrive(entry: dict[str, Any]) -> None:
    with charged(entry):
        list(received(OddTransport(entry), Manifest(Version("actor", 0, 1), "full", (), "here")))


class OddProcessor(ModalityProcessor):
    medium = "image"
    entry: dict[str, Any] = {}

    def budget(self, media: Any, model: Any) -> Any:
        return value(self.entry["budget"])

    def process(self, media: Any, data: bytes, model: Any) -> Any:
        return value(self.entry["process"])


@entries("media")
def test_modality_processors_are_named(entry: dict[str, Any], tmp_path: Path) -> None:
    processor, host = OddProcessor(), MediaHost()
    processor.entry = entry
    host.component, host.build = Chosen("modality-processor", "odd"), lambda chosen: processor
    host.open(str(tmp_path), {}, 1 << 20, 0, ((), (str(tmp_path),), 1.0))
    (tmp_path / "x.png").write_bytes(b"x")
    with charged(entry):
        host.handle(("process" if "process" in entry else "budget", Media("image", str(tmp_path / "x.png"))))


@entries("engine")
def test_an_engine_with_an_odd_response_is_replaced(entry: dict[str, Any]) -> None:
    router = Router([EngineState("engine-0", status=EngineStatus.SERVING)], RequestLimits())
    request = PendingRequest((1, 2), 8)
    request.id = "1"
    router.submit([request], 0.0)
    router.dispatch(0.0)
    actions = router.on_deltas("engine-0", 0, (value(entry["delta"]),), 1.0)
    replaced = [action for action in actions if isinstance(action, Quarantine)]
    assert bool(replaced) != bool(entry.get("ok"))
    if replaced:
        check_says(entry, replaced[0].why)


@entries("asked")
async def test_odd_arguments_reach_neither_router_nor_engine(entry: dict[str, Any]) -> None:
    pool: Any = None  # not reached
    client = PoolModelClient("judge", pool, Letters(), SystemClock(), 9.0)
    models = model_handlers({"judge": client}, "reward odd", ("judge",))["model"]

    class Here:
        """The client of a reward, whose requests go straight to the parent's handler."""

        async def generate(self, *args: Any, **named: Any) -> Any:
            return await models("judge", "generate", args, named)

        async def score(self, *args: Any, **named: Any) -> Any:
            return await models("judge", "score", args, named)

    with pytest.raises(ValueError) as caught:  # noqa: PT011 the table has the texts
        await value(entry["call"], client=Here())
    check_says(entry, str(caught.value))


@pytest.mark.parametrize("tools", ["('search',)", "5", "({'name': 'search'},)", "None"])
def test_tools_of_another_type_are_refused_at_the_start(tools: str) -> None:
    with pytest.raises(PluginError, match=r"environment odd: tools.*api.Tool"):
        check_tools("odd", value(tools))
    check_tools("odd", (Tool("search"),))
