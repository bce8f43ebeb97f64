# SPDX-License-Identifier: Apache-2.0
"""Values in the column `answer`: each reward reads a gold whole, as the number or text that it is, or refuses the row."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_plugin_rewards.code import Code, CodeOptions, read_cases
from relax_plugin_workbench.data_survey import data_files, survey
from relax_plugin_workbench.try_run import try_reward

from relax_core.api import Chosen, Gold, Reward, SandboxLimits, Score, Task, Trajectory
from relax_core.api.errors import ConfigError
from relax_core.data.tasks import has_value
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.golds import MOST_CHECKED, check_golds
from relax_core.rewards.host import GoldResult, RewardHost, pack_units, reads_golds
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.testing.samples import trajectory

ROWS, ROWS_OF_CASES = (
    [json.loads(line) for line in (Path(__file__).parent / name).read_text().split("\n") if line]
    for name in ("gold_values.jsonl", "cases.jsonl")
)
CATALOGUE = Catalogue.load()


def host(reward: str, **options: Any) -> RewardHost:
    """Return the host of a reward in this process, opened."""
    opened = RewardHost()
    opened.component, opened.build = Chosen("reward", reward, options), CATALOGUE.build
    opened.open()
    return opened


def gold_of(opened: RewardHost, task: Task) -> GoldResult:
    """Return the result of one gold, as the pool of the reward's process would."""
    item: Any = [(task, None)]
    try:
        (result,) = opened.pack_result(item, opened.handle(item))
    except Exception as error:
        (result,) = opened.pack_error(item, error)[1]
    return result


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['reward']}-{row['answer']!r}")
def test_a_gold_scores_best_and_its_pieces_do_not_or_the_row_is_refused(row: dict[str, Any]) -> None:
    opened, task = host(row["reward"]), Task("t", "?", row["answer"])
    gold = gold_of(opened, task)
    if "refused" in row:
        assert row["refused"] in gold.fault and "task t" in gold.fault
        return
    assert gold.fault == "" and gold.read and gold.responses

    def score(response: str) -> float:
        result = opened.handle([(task, trajectory(task, response))])
        return result.value if isinstance(result, Score) else float(result)

    assert [score(response) for response in row["right"]] == [1.0] * len(row["right"])
    assert all(score(response) < 1.0 for response in row["wrong"])


@pytest.mark.parametrize("options", [{}, {"boxed_only": True}])
def test_a_gold_is_scored_boxed_and_plain(options: dict[str, Any]) -> None:
    gold = gold_of(host("maths", **options), Task("t", "?", "(1, 2)"))
    assert gold.responses == ("\\boxed{(1, 2)}", "(1, 2)")[: 2 - len(options)]
    assert gold.scores == (1.0,) * len(gold.responses)


@pytest.mark.parametrize(
    ("reward", "options"),
    [("deepscaler", {"think": "required"}), ("f1", {"tag": "answer", "think": "required"}), ("dapo", {"strict_box": True}),
     ("dapo", {"right": 2.0, "wrong": 0.0}), ("geo3k", {"format_weight": 0.5}), ("openr1mm", {"format_weight": 0.0}),
     ("gpqa", {"think": "required"}), ("exact", {"strip": True})],
)  # fmt: skip
def test_options_of_a_reward_do_not_make_its_golds_bad(reward: str, options: dict[str, Any]) -> None:
    assert gold_of(host(reward, **options), Task("t", "?", "B")).fault == "" or reward == "geo3k"
    assert gold_of(host(reward, **options), Task("t", "?", "B" if reward == "gpqa" else "12")).fault == ""


class Half(Reward):
    """Pays for half of its responses; reads the golds that are whole numbers."""

    def gold(self, task: Task) -> Gold:
        return Gold(f"number {int(task.answer)}", (f"\\boxed{{{task.answer}}}", str(task.answer)))

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        if task.answer == "13":
            raise LookupError("no thirteen")
        return float(trajectory.response == task.answer or task.answer == "42")


class Promising(Half):
    """Returns a coroutine from a plain method."""

    def score(self, task: Task, trajectory: Trajectory) -> Any:
        return super().score(task, trajectory)


class Asking(Half):
    """Calls a pool."""

    needs_engines = ("judge",)


class Boxed(Half):
    """Runs programs."""

    needs_sandbox = SandboxLimits()


@pytest.mark.parametrize("kind", [Half, Promising])
async def test_golds_of_an_async_reward_are_scored_like_its_samples(kind: type[Reward]) -> None:
    opened = RewardHost()
    opened.component, opened.build = Chosen("reward", "half"), lambda chosen: kind()
    reads = opened.open().reads_golds
    assert reads
    units: Any = [[(Task("t", "?", answer), None)] for answer in ("42", "7", "13", "x")]
    found: dict[int, Any] = {}
    async for results, _ in opened.run_items(pack_units(units), 20.0, False):
        found |= {number: (status, value) for number, status, value in results}
    faults = [found[number][1][0].fault for number in range(4)]
    assert [found[number][0] for number in range(4)] == ["done"] * 4
    assert faults[0] == "" and faults[1].startswith("read as number 7, it scores 0 instead of 1 for the response")
    assert "LookupError: no thirteen (" in faults[2] and "invalid literal for int()" in faults[3]


def test_golds_of_a_reward_that_calls_a_pool_are_not_read() -> None:
    opened = RewardHost()
    opened.component, opened.build = Chosen("reward", "asking"), lambda chosen: Asking()
    assert opened.open().reads_golds is False and not reads_golds(Asking)


async def test_golds_of_a_reward_that_calls_a_sandbox_are_read_but_not_scored() -> None:
    opened = RewardHost()
    opened.component, opened.build = Chosen("reward", "boxed"), lambda chosen: Boxed()
    assert opened.open().reads_golds is True and reads_golds(Boxed)
    assert await opened.handle([(Task("t", "?", "7"), None)]) == GoldResult("number 7")
    assert "invalid literal for int()" in gold_of(opened, Task("t", "?", "x")).fault


@pytest.mark.parametrize("row", ROWS_OF_CASES, ids=lambda row: json.dumps(row["cases"])[:60])
def test_cases_are_read_as_they_are_written_or_the_row_is_refused(row: dict[str, Any]) -> None:
    if "refused" in row:
        with pytest.raises(ValueError, match="task t: column cases") as refused:
            read_cases("t", row["cases"])
        assert row["refused"] in str(refused.value)
    else:
        assert [str(case) for case in read_cases("t", row["cases"])] == row["read"]


def test_a_row_that_calls_a_function_is_refused_for_a_language_without_calls() -> None:
    task = Task("t", "?", None, {"cases": [{"function": "f", "arguments": [], "output": 1}]})
    with pytest.raises(ValueError, match="calls the function f, which a program in c can't offer"):
        Code(CodeOptions(language="c")).gold(task)
    assert Code().gold(task).read == "the first of 1 as f() -> 1"


def test_a_check_of_the_data_names_rows_whose_cases_cannot_be_read(tmp_path: Path) -> None:
    rows = [[{"input": "1", "output": "1"}], {"fn_name": "f", "inputs": ["abc"], "outputs": ["cba"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": "?", "cases": cases}) for cases in rows))
    (found,) = map(survey, data_files(tmp_path / "rows.jsonl", None, "code"))
    assert [row.where.endswith("rows.jsonl:2") for row in found.bad] == [True]
    assert "task rows:2: column cases can't be read: inputs.0 has the text 'abc'" in found.bad[0].reason
    assert found.golds is not None and (found.golds.checked, found.usable) == (2, 1)


def test_a_reward_that_does_not_pay_for_its_own_gold_is_named_with_the_response() -> None:
    opened = host("maths")
    opened._score = lambda task, attempt: 0.25  # type: ignore[method-assign]
    fault = gold_of(opened, Task("t", "?", "42")).fault
    assert fault == r"read as number 42, it scores 0.25 instead of 1 for the response '\\boxed{42}'"


class Scorer:
    """A scorer whose reward `odd` can't read the golds of some tasks."""

    def __init__(self) -> None:
        self.asked: list[Task] = []

    async def golds(self, tasks: list[Task]) -> list[dict[str, GoldResult]]:
        self.asked += tasks
        good = GoldResult("number 1", ("1",), (1.0,))
        return [{"odd": GoldResult(error="task is odd") if int(task.id) % 2 else good} for task in tasks]


class Rows:
    def __getitem__(self, index: int) -> Task:
        return Task(str(index), "?", "1")

    def where(self, index: int) -> str:
        return f"tasks.jsonl:{index + 1}"


async def test_too_many_bad_golds_are_refused_with_their_lines() -> None:
    report = await check_golds(Scorer(), Rows(), range(4))  # type: ignore[arg-type]
    assert [bad.where for bad in report.bad] == ["tasks.jsonl:2", "tasks.jsonl:4"] and report.share == 0.5
    assert [(where, gold.read) for where, _, gold in report.read][0] == ("tasks.jsonl:1", "number 1")
    report.refuse("data.train", 0.5)
    with pytest.raises(ConfigError, match=r"data.train.*tasks.jsonl:2: reward odd: task is odd.*max_bad_golds = 0.4"):
        report.refuse("data.train", 0.4)


async def test_a_large_file_is_checked_at_equal_distances_and_the_rest_is_named() -> None:
    scorer = Scorer()
    report = await check_golds(scorer, Rows(), range(10 * MOST_CHECKED))  # type: ignore[arg-type]
    assert len(scorer.asked) == report.tried == MOST_CHECKED
    assert [int(task.id) for task in scorer.asked[:3]] == [0, 10, 20]
    assert "9000 further rows were not checked" in str(report)


@pytest.mark.parametrize("most", [0.0, 0.5])
async def test_a_run_with_too_many_bad_golds_is_refused_at_its_start(most: float) -> None:
    logged: list[Any] = []

    async def emit(event: Any) -> None:
        logged.append(event)

    scorer = Scorer()
    scorer.reads_golds = True  # type: ignore[attr-defined]
    sets = [SimpleNamespace(tasks=Rows(), indices=[0])]
    config = SimpleNamespace(data=SimpleNamespace(max_bad_golds=most), eval=SimpleNamespace(sets=sets))
    worker = RolloutWorker.__new__(RolloutWorker)
    worker._trains = True
    worker.scorer, worker._tasks, worker._train = scorer, Rows(), range(2)  # type: ignore[assignment]
    worker._sets = sets  # type: ignore[assignment]
    worker._context = SimpleNamespace(config=config, run_status=SimpleNamespace(emit=emit))  # type: ignore[assignment]
    if most:
        await worker._check_golds()
        assert [event.level for event in logged] == ["warning", "info"]
    else:
        with pytest.raises(ConfigError, match=r"tasks.jsonl:2: reward odd: task is odd"):
            await worker._check_golds()
    assert "data.train: 1 of 2 gold answers (50.0%) do not earn the best score" in str(logged[0])


@pytest.mark.parametrize(
    ("value", "present"), [(None, False), (float("nan"), False), ("nan", True), (0, True), ("", True)]
)
def test_nan_is_not_a_value_of_a_column(value: object, present: bool) -> None:
    assert has_value(value) == present


@pytest.mark.parametrize("line", ['{"prompt": "q", "response": "42"}', '{"prompt": "q", "response": "42", "answer": null}',
                                  '{"prompt": "q", "response": "nan", "answer": NaN}'])  # fmt: skip
async def test_try_reward_refuses_a_row_without_a_column_that_the_reward_needs(line: str, tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    data.write_text('{"prompt": "q", "response": "42", "answer": "42"}\n' + line)
    with pytest.raises(ConfigError, match=r"answers.jsonl:2 without a value for 'answer', which exact reads"):
        await try_reward("exact", (), data, ())


def test_data_check_names_a_reward_that_reads_no_golds(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"prompt": "q", "answer": "42"}\n')
    with pytest.raises(ConfigError, match="reads no gold answers"):
        list(data_files(data, None, "random"))
    (found,) = data_files(data, None, "maths")
    assert [one.chosen.name for one in found.rewards] == ["maths"]
    (plain,) = data_files(data, None)
    assert survey(plain).golds is None
