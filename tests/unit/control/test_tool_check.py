# SPDX-License-Identifier: Apache-2.0
"""Tools that the policy has no way of calling are refused before a run begins, also those of a later stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_contrib.recipes.quickstart.model import save_tokenizer
from relax_core.api.errors import ConfigError
from relax_core.control.dry_run import tool_lines
from relax_core.control.prepare import plan_run, prepare
from relax_core.testing.trainer import tiny_model

TOOLS = '''
from relax_core.api import Environment, Step, Tool


class Written(Environment):
    """Has a tool."""

    tools = (Tool("look"),)
    gives_reward = True

    async def reset(self, task, seed):
        return None

    async def step(self, action):
        return Step("", True, 1.0)


class Found(Written):
    """Finds its tools."""

    tools = ()

    @classmethod
    async def find_tools(cls, options):
        return (Tool("look"),)


class FoundNone(Found):
    """Finds none."""

    @classmethod
    async def find_tools(cls, options):
        return ()
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows no tool calls, rows for each stage and the environments."""
    folder = tmp_path_factory.mktemp("files")
    save_tokenizer(folder / "model")
    tiny_model(folder / "model")
    (folder / "tools_of_tests.py").write_text(TOOLS)
    said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
    return folder


def layer(files: Path, environment: str, **more: Any) -> dict[str, Any]:
    warm = {"algorithm": "sft", "data": {"train": str(files / "rows.jsonl")}, "steps": 1}
    sampled = {"algorithm": "grpo", "data": {"train": str(files / "tasks.jsonl")}, "environment": environment}
    return {
        "model": {"path": str(files / "model"), **more}, "plugins": [str(files / "tools_of_tests.py")],
        "rollout": {"max_new_tokens": 8}, "eval": {"every": 0}, "stages": [warm, sampled],
    }  # fmt: skip


@pytest.mark.parametrize("environment", ["written", "found"])
def test_the_dry_run_and_the_start_refuse_tools_of_a_stage_after_a_warm_start(
    files: Path, environment: str, tmp_path: Path
) -> None:
    refused = r"stages\[1\]\.model\.tool_calls: got auto for prompts with tools.*deepseek.*hermes"
    with pytest.raises(ConfigError, match=refused):
        list(tool_lines(plan_run([layer(files, environment)], [])))
    with pytest.raises(ConfigError, match=refused):
        prepare([layer(files, environment)], [], run_dir=tmp_path / "run")


def test_callable_tools_and_environments_without_tools_pass(files: Path) -> None:
    list(tool_lines(plan_run([layer(files, "written", tool_calls="hermes")], [])))
    list(tool_lines(plan_run([layer(files, "found-none")], [])))
    list(tool_lines(plan_run([layer(files, "single-turn"), {"rewards": ["exact"]}], [])))
