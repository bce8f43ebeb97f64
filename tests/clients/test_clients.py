# SPDX-License-Identifier: Apache-2.0
"""Seven client libraries in every dialect that they speak, over three kinds of chat templates, and a run that trains them.

What they were answered is one row, and is trained as it was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_core.api import Message, Outcome, Task, Trajectory
from relax_core.sampling.environments import EnvironmentPool
from relax_core.sampling.episode import Limits, run_episode
from relax_core.views.run import open_run
from tests.clients.conftest import PYTHON
from tests.clients.model_folders import KINDS, write_model
from tests.clients.policy import Says
from tests.graph.conftest import Relax
from tests.unit.sampling.environment_pool import environment_pool
from tests.unit.sampling.toy_policy import answering

EXAMPLES = Path(__file__).parents[2] / "plugins/relax-plugin-agents/examples"
CLIENTS = (
    ("openai_sdk.py", "chat"),
    ("openai_sdk.py", "chat-stream"),
    ("openai_sdk.py", "responses"),
    ("anthropic_sdk.py", "whole"),
    ("anthropic_sdk.py", "stream"),
    ("openai_agents.py", "chat"),
    ("openai_agents.py", "responses"),
    ("smolagents_tools.py",),
    ("pydantic_ai_agent.py", "chat"),
    ("pydantic_ai_agent.py", "messages"),
    ("langgraph_react.py", "chat"),
    ("langgraph_react.py", "responses"),
    ("langgraph_react.py", "messages"),
    ("mini_swe_agent.py", "openai"),
    ("mini_swe_agent.py", "anthropic"),
)
COMMAND = [PYTHON, str(Path(__file__).with_name("by_task.py")), str(EXAMPLES)]
QUESTION, ANSWER = "What is 17 + 25? Use the tool.", "42"


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def lines(client: tuple[str, ...]) -> list[str]:
    """What the policy says to a client: thoughts, words and calls, and in the end the answer."""
    thought = "<think>\nI had better add them.\n</think>\n\n"
    if client[0].startswith("mini_swe"):
        done = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"
        return [
            f"{thought}I look.\n{called('bash', command='echo $((17+25))')}",
            thought + called("bash", command=done),
        ]
    final = called("final_answer", answer=ANSWER) if client[0].startswith("smolagents") else f"It is {ANSWER}."
    if stops(client):
        final += "\n\nQ: What else?"
    two = f"{called('add', b=25, a=17)}\n{called('add', a=1, b=2)}"
    return [
        f"{thought}I add.\n{called('add', a=17, b=25)}",
        thought + two,
        f"<think>\nIt is {ANSWER}.\n</think>\n\n{final}",
    ]


def stops(client: tuple[str, ...]) -> bool:
    """True if the client sends a stop text, which the policy's answer goes beyond."""
    return client[0].endswith("_sdk.py") and client[1] != "responses"


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[EnvironmentPool]:
    """Environments whose agent is the client that a task names."""
    async with environment_pool("agent", {"command": COMMAND}, timeout_s=240) as pool:
        yield pool


def written(folder: Path, kind: str) -> Path:
    return write_model(folder, kind, [file.read_text() for file in sorted(EXAMPLES.iterdir()) if file.is_file()])


@pytest.fixture(
    scope="module",
    params=[kind if kind == "thoughts left out" else pytest.param(kind, marks=pytest.mark.faults) for kind in KINDS],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFamily:
    family = ChatFamily()
    family.open({"path": str(written(tmp_path_factory.mktemp("models") / "model", request.param))})
    return family


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "client", [*CLIENTS, pytest.param(("pydantic_ai_agent.py", "responses"), marks=pytest.mark.faults)], ids=" ".join
)
async def test_a_clients_conversation_is_one_row_trained_as_sampled(
    client: tuple[str, ...], family: ChatFamily, pool: EnvironmentPool
) -> None:
    policy = Says([(*family.encode(text), family.stop_tokens[0]) for text in lines(client)], family.stop_tokens)
    task, first = Task("one", QUESTION, ANSWER, {"agent": list(client)}), family.start((Message("user", QUESTION),))
    sample: Trajectory = await pool.play(
        lambda environment: run_episode(task, first, 7, environment, family, answering(policy), Limits(400, 8))
    )
    assert sample.outcome is Outcome.FINISHED, sample.info
    assert sample.environment_reward == 1.0, sample.messages
    assert not sample.num_discarded and len(policy.calls) == len(lines(client))
    rows = sample.rows()
    reasons = sample.info["agent"]["calls"]
    rewrites = client[0].startswith("smolagents")  # its history is text of its own making
    assert len(rows) == (len(policy.calls) if rewrites else 1), sample.info
    assert reasons == ({"first": 1, "rewritten": 2} if rewrites else {"first": 1, "continued": len(policy.calls) - 1})
    for number, (asked, said) in enumerate(policy.calls):
        row = rows[number if rewrites else 0]
        assert row.tokens[: len(asked) + len(said)] == asked + said, "what the engine saw is what is trained"
        assert all(row.loss_mask[len(asked) : len(asked) + len(said)])
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(said) for _, said in policy.calls)
    prompt, answer = (family.decode(tokens, skip_special=False) for tokens in policy.calls[-1])
    if not rewrites and not client[0].startswith("mini_swe"):
        results = re.findall(r"(?:<tool_response>|ipython<\|end_header\|>)\s+(\d+)\b", prompt)
        assert results == ["42", "42", "3"], "results follow their calls, in whatever order the client sends them"
    assert answer.endswith("\n\nQ:") == stops(client), "the sampled tokens end with the stop text"


def test_a_client_of_every_library_is_trained(relax: Relax, tmp_path: Path) -> None:
    written(tmp_path / "model", "plain")
    clients = list({client[0]: client for client in CLIENTS}.values())
    rows = [{"id": "-".join(client), "prompt": QUESTION, "answer": ANSWER, "agent": client} for client in clients]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(f"""
steps = 1
max_staleness = 0
algorithm = {{ name = "reinforce", entropy_coef = 0.01 }}   # equal rewards alone would give nothing to train
engine = "transformers"
trainer = "torch"
[model]
path = "model"
[data]
train = "tasks.jsonl"
[environment]
name = "agent"
command = {json.dumps(COMMAND)}
timeout_s = 240
[rollout]
groups_per_step = {len(clients)}
group_size = 1
max_new_tokens = 12
max_turns = 8
[eval]
every = 0
""")
    ran = relax("train", "run.toml", "--runner", "local", "--run-dir", "run", "--json")
    assert ran.code == 0, ran.err
    summary = ran.json
    assert (summary["status"], summary["balanced"]) == ("finished", True)
    assert summary["samples_trained"] == len(clients)
    run = open_run(tmp_path / "run")
    (row,) = [row for row in run.metrics() if "reward/mean" in row]
    assert row["train/rollout_log_prob_diff_lag0_max"] < 1e-4, "the trainer sees the tokens that the engine sampled"
    assert not [key for key in row if key.startswith("tokens/discarded/")], "every answer was read"
    played = {sample["task_id"] for sample in run.samples(1) if sample["reward"] is not None}
    assert played == {"-".join(client) for client in clients}
