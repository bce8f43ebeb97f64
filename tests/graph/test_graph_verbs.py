# SPDX-License-Identifier: Apache-2.0
"""Verbs that look at the graph or try parts of it without training."""

from __future__ import annotations

import json
from pathlib import Path

from tests.graph.conftest import Relax


def test_the_graph_is_drawn_in_every_form(relax_here: Relax, tiny: Path) -> None:
    arguments = ("graph", tiny / "recipe.toml", "algorithm.kl_coef=0.1")
    text, mermaid, plain = (relax_here(*arguments, "--format", form) for form in ("text", "mermaid", "json"))
    assert [ran.code for ran in (text, mermaid, plain)] == [0, 0, 0], text.err
    operations = [operation["name"] for operation in json.loads(plain.out)]
    assert operations == [line.split()[0] for line in text.out.splitlines() if not line.startswith("note:")]
    assert operations[0] == "rollout.generate" and operations[-1] == "actor.fit"
    assert "reference_log_probs[reference.log_probs] -- ref_log_probs --> actor_fit[actor.fit]" in mermaid.out


def test_a_dry_run_starts_and_writes_nothing(relax_here: Relax, tiny: Path, tmp_path: Path) -> None:
    ran = relax_here("train", tiny / "recipe.toml", "--dry-run", "--run-dir", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert "actor.fit" in ran.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_what_a_run_would(relax_here: Relax, tiny: Path) -> None:
    ran = relax_here("train", tiny / "recipe.toml", "rollout.group_size=1", "--dry-run")
    assert ran.code == 2
    assert "rollout.group_size" in ran.err and "Traceback" not in ran.err


def test_a_few_rollouts_are_scored_without_training(relax_here: Relax, tiny: Path, tmp_path: Path) -> None:
    ran = relax_here("try", tiny / "recipe.toml", "rollout.group_size=2", "--tasks", "2", "--json")
    assert ran.code == 0, ran.err
    records = json.loads(ran.out)
    assert [(record["group_id"], record["sample_index"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(record["reward"] in (0.0, 1.0) and record["prompt"] for record in records)
    assert {record["answer_reward"] for record in records} == {1.0}
    assert all(gold["read"] and not gold["fault"] for record in records for gold in record["golds"].values())
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


def test_a_reward_is_tried_on_written_responses(relax_here: Relax, tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "response": "4", "answer": "4"}, {"prompt": "2+2=", "response": "5", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = relax_here("try", "reward", "exact", "--data", tmp_path / "rows.jsonl", "--json")
    assert ran.code == 0, ran.err
    assert [record["reward"] for record in json.loads(ran.out)] == [1.0, 0.0]
    read = relax_here("try", "reward", "exact", "--data", tmp_path / "rows.jsonl")
    assert read.code == 0, read.err
    assert "reward 1 " in read.out and "reward 0 " in read.out


def test_a_reward_that_runs_programs_is_tried_in_the_sandbox(relax_here: Relax, tmp_path: Path) -> None:
    cases = [{"input": "2 3", "output": "5"}]
    programs = ("a, b = map(int, input().split())\nprint(a + b)", "print(6)")
    rows = [{"prompt": "Add two numbers.", "response": f"```python\n{one}\n```", "cases": cases} for one in programs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = relax_here("try", "reward", "code", "--data", tmp_path / "rows.jsonl", "--json")
    assert ran.code == 0, ran.err
    assert [record["reward"] for record in json.loads(ran.out)] == [1.0, 0.0]


def test_a_row_without_a_response_is_named_by_its_line(relax_here: Relax, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b", "answer": "b"}\n{"prompt": "a"}\n')
    ran = relax_here("try", "reward", "exact", "--data", tmp_path / "rows.jsonl")
    assert ran.code == 2
    assert "rows.jsonl:2" in ran.err and "response" in ran.err
