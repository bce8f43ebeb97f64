# SPDX-License-Identifier: Apache-2.0
"""Verbs that look at the graph or try parts of it without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_workbench import try_run

from relax_core.testing.scripted_client import ScriptedClient
from tests.graph.conftest import Relax

pytestmark = pytest.mark.one_process("engines")  # whose fork server loads torch once


def test_the_graph_is_drawn_in_every_form(relax_here: Relax, tiny: Path) -> None:
    arguments = ("graph", tiny / "recipe.toml", "algorithm.kl_coef=0.1")
    text, mermaid, plain = (relax_here(*arguments, "--format", form) for form in ("text", "mermaid", "json"))
    assert [ran.code for ran in (text, mermaid, plain)] == [0, 0, 0], text.err
    operations = [operation["name"] for operation in json.loads(plain.out)]
    assert operations == [line.split()[0] for line in text.out.splitlines() if not line.startswith("note:")]
    assert operations[0] == "rollout.generate" and operations[-1] == "actor.fit"
    assert "reference_log_probs[reference.log_probs] -- ref_log_probs --> actor_fit[actor.fit]" in mermaid.out


def test_a_dry_run_shows_the_plan_or_refuses_as_a_run_would_and_writes_nothing(
    relax_here: Relax, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_core.control.dry_run.check_starts", lambda *_: ())  # imports torch
    ran = relax_here("train", tiny / "recipe.toml", "--dry-run", "--run-dir", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "actor.fit" in ran.out
    refused = relax_here("train", tiny / "recipe.toml", "rollout.group_size=1", "--dry-run")
    assert refused.code == 2 and "rollout.group_size" in refused.err and "Traceback" not in refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_few_rollouts_are_scored_without_training(relax_here: Relax, tiny: Path, tmp_path: Path) -> None:
    few = ("eval.sets=[]", "rollout.groups_per_step=4000")
    ran = relax_here("try", tiny / "recipe.toml", "rollout.group_size=2", *few, "--tasks", "2", "--json")
    assert ran.code == 0, ran.err
    assert "relax: warning: 4096 tasks: 128 are held out, 0 equal a held-out task, 3968 remain" in ran.err
    records = json.loads(ran.out)
    assert [(record["group_id"], record["sample_index"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(record["reward"] in (0.0, 1.0) and record["prompt"] for record in records)
    assert {record["answer_reward"] for record in records} == {1.0}
    assert all(gold["read"] and not gold["fault"] for record in records for gold in record["golds"].values())
    assert "step 1: check failed" not in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_no_reward_judges_is_refused_at_start(relax_here: Relax, tiny: Path) -> None:
    ran = relax_here(
        "try", tiny / "recipe.toml", 'rewards=[{name="exact", only="kind=sums"}]', "--tasks", "1", "--json"
    )
    assert ran.code == 2 and "which no reward judges" in ran.err and 'only = "otherwise"' in ran.err
    rewards = 'rewards=[{name="maths", only="kind=sums"}, {name="exact", only="otherwise"}]'
    idle = relax_here("try", tiny / "recipe.toml", rewards, "--tasks", "1", "--json")
    assert idle.code == 2 and "rewards.0.only: got 'kind=sums'; no task has this value" in idle.err
    rewards = 'rewards=[{name="exact", only="otherwise"}]'
    tried = relax_here("try", tiny / "recipe.toml", rewards, "--tasks", "1", "--json")
    assert tried.code == 0, tried.err
    assert {tuple(record["rewards"]) for record in json.loads(tried.out)} == {("exact",)}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


SUM = {"prompt": "2+2=", "answer": "4"}
CODE = {"prompt": "Add two numbers.", "cases": [{"input": "2 3", "output": "5"}]}


@pytest.mark.parametrize(
    ("reward", "right", "wrong"),
    [
        ("exact", {**SUM, "response": "4"}, {**SUM, "response": "5"}),
        ("code", {**CODE, "response": "```python\nprint(5)\n```"}, {**CODE, "response": "```python\nprint(6)\n```"}),
    ],
    ids=["exact", "code"],
)  # fmt: skip
def test_a_reward_is_tried_on_written_responses(
    relax_here: Relax, tmp_path: Path, reward: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """`code` runs programs in the sandbox."""
    words = ("try", "reward", reward, "--data", written(tmp_path, right, wrong))
    ran = relax_here(*words, "--json")
    assert ran.code == 0, ran.err
    assert [record["reward"] for record in json.loads(ran.out)] == [1.0, 0.0]
    if reward == "exact":
        read = relax_here(*words)
        assert read.code == 0 and "reward 1 " in read.out and "reward 0 " in read.out, read.err


class ScriptedPools:
    """The pool `judge` with scripted answers, in place of engines."""

    def __init__(self) -> None:
        self.clients = {"judge": ScriptedClient("judge", lambda asked: "9" if "2+2=4" in asked else "2")}

    @classmethod
    def from_context(cls, *_: Any, **__: Any) -> ScriptedPools:
        return cls()

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


def judge_words(tiny: Path, folder: Path, judge: str) -> tuple[str | Path, ...]:
    """Return words that try a judge on three answers, of which one is labelled as good."""
    rows = [{"id": "t", "prompt": "2+2=", "response": str(at), "good": at == 4} for at in range(3, 6)]
    return (
        "judge", tiny / "recipe.toml", f'engines=[{{name="judge", path="{tiny / "model"}"}}]',
        f'rewards=[{{name="judge", chat=false, template="{{prompt}}{{response}}", {judge}}}]',
        "--data", written(folder, *rows), "--label", "good",
    )  # fmt: skip


def test_a_judge_of_a_configuration_is_compared_with_labels(
    relax_here: Relax, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(try_run, "AuxiliaryPools", ScriptedPools)
    words = (*judge_words(tiny, tmp_path, "high=10.0"), "run.runner=inline")
    ran = relax_here("try", "reward", *words, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert [(one["reward"], one["label"]) for one in found["samples"]] == [(0.2, 0.0), (0.9, 1.0), (0.2, 0.0)]
    assert found["agreement"] == {
        "samples": 3, "failed": 0.0, "accuracy": 1.0, "kappa": 1.0, "spearman": pytest.approx(1.0), "pairs": 1.0,
        "parts": {"judge": pytest.approx(1.3 / 3), "judge/verdicts/unreadable": 0.0},
    }  # fmt: skip
    refused = relax_here("try", "reward", "other", *words[1:])
    assert refused.code == 2 and "name a reward of the configuration: judge" in refused.err
    no_pool = relax_here("try", "reward", "judge", "--data", words[5])
    assert no_pool.code == 2 and "relax try reward NAME FILE" in no_pool.err


@pytest.mark.faults
def test_a_judge_is_tried_with_engines_of_its_own(relax_here: Relax, tiny: Path, tmp_path: Path) -> None:
    words = judge_words(tiny, tmp_path, 'read="log-probs", choices={"0"=0.0, "9"=1.0}')
    ran = relax_here("try", "reward", *words, "--json")
    assert ran.code == 0, ran.err
    assert all(0 < one["reward"] < 1 for one in json.loads(ran.out)["samples"])


def test_scores_are_compared_with_labels(relax_here: Relax, tmp_path: Path) -> None:
    """A wrong label is named by its line, and a row that can't be judged is counted apart."""
    rows = [{**SUM, "response": str(at), "good": at == 4} for at in (3, 4)]
    lost = {**SUM, "answer": [], "response": "4", "good": True}
    words = ("try", "reward", "exact", "--label", "good", "--data")
    ran = relax_here(*words, written(tmp_path, *rows, lost))
    assert ran.code == 0, ran.err
    assert "3 samples against good, 33.3% without a score\n  accuracy: 1\n  kappa: 1\n  spearman: 1" in ran.out
    ran = relax_here(*words, written(tmp_path, {**rows[0], "good": "yes"}))
    assert ran.code == 2 and "rows.jsonl:1: good = 'yes'" in ran.err
    ran = relax_here("try", "my.toml", "--label", "good")
    assert ran.code == 2 and "relax try reward NAME" in ran.err


def test_a_row_without_a_response_is_named_by_its_line(relax_here: Relax, tmp_path: Path) -> None:
    rows = written(tmp_path, {"prompt": "a", "response": "b", "answer": "b"}, {"prompt": "a"})
    ran = relax_here("try", "reward", "exact", "--data", rows)
    assert ran.code == 2 and "rows.jsonl:2" in ran.err and "response" in ran.err
