# SPDX-License-Identifier: Apache-2.0
"""`relax try`: sample and score a few tasks exactly as training would, or score given responses with one reward.

`relax try` has no trainer and no run directory. Rewards run in the same isolated processes as in training.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

from relax_core.api.checks import CheckFinding, FirstStepFacts
from relax_core.api.component import Chosen
from relax_core.api.engine import ModelClient
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.role import SystemClock
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Trajectory
from relax_core.config.layers import (
    COMMAND_LINE,
    Origin,
    Source,
    expand,
    parse_override,
    plain as plain_tree,
    plugins_of,
    read_layers,
    with_origins,
)
from relax_core.data.plain_data import plain, read_json
from relax_core.data.tasks import has_value
from relax_core.data.unpacked_file import unpacked
from relax_core.engines.factories import AuxiliaryPools
from relax_core.launch import Catalogue, RewardChoice, first_step
from relax_core.rewards.host import GoldResult
from relax_core.rewards.scorer import RewardScorer
from relax_core.roles.first_rows import row_facts
from relax_core.rpc.isolated_pool import ProcessStarter
from relax_core.runners.local.workers import LocalWorkers
from relax_core.sampling.rollout_worker import RolloutWorker
from relax_core.sampling.rows import records, row_batch, sample_record
from relax_core.sandboxes.pool import SandboxPool
from relax_plugin_workbench.agreement import Agreement, Labelled, agreement
from relax_plugin_workbench.single_role import first_attempts, ignore, single_role, try_launch, warnings


async def try_tasks(
    sources: Sequence[Source], overrides: Sequence[str], num_tasks: int
) -> tuple[tuple[dict[str, Any], ...], tuple[CheckFinding, ...], tuple[str, ...]]:
    """Sample and score `num_tasks` groups; return a record for each sample, as in the run directory, checks and warnings.

    `answer_reward` of a record is the reward of the task's own answer; None if rewards alone can't judge an answer. The
    checks are those of a run's first step; those that need a trainer are not applicable.
    """
    with tempfile.TemporaryDirectory(prefix="relax-try-") as directory:
        _, launch, catalogue = try_launch(sources, overrides, Path(directory))
        async with single_role("rollout", launch, catalogue) as context:
            worker = await RolloutWorker.open(context, ignore)
            size = context.config.rollout.group_size
            try:
                issues = [first_attempts(group, size) for group in range(num_tasks)]
                groups = [await worker.make(issue, worker.engines.newest()) for issue in issues]
                scored = records(await worker.score(groups))
                golds = await worker.scorer.golds([group.task for group in groups])
                facts = await worker.first_step_facts(groups)
                earned = {task["group"]: task["answer"]["earned"] for task in facts["tasks"] if task["answer"]}
                rows, _ = row_batch([sample for group in groups for sample in group.samples], context.plan.greedy)
                facts = {**facts, "rows": row_facts(rows)}
                checks = first_step(FirstStepFacts(launch.config, {}, facts), catalogue)
                played = [trajectory for group in groups for trajectory in group.trajectories]
                shown = tuple(
                    {
                        **record,
                        "answer_reward": earned.get(record["group_id"]),
                        "golds": shown_golds(golds[record["group_id"]]),
                        "nodes": nodes(sample, worker.family),
                        **shown_tokens(sample, worker.family),
                        "info": dict(sample.info),
                    }
                    for record, sample in zip(scored, played, strict=True)
                )
                return shown, checks, await warnings(context)
            finally:
                await worker.close()


def nodes(trajectory: Trajectory, family: ModelFamily) -> list[dict[str, object]]:
    """Return a sample's nodes as JSON data: parent node, text, number of tokens and of trained tokens, named context."""
    trained, contexts = _trained(trajectory), trajectory.contexts
    return [
        {"parent": node.parent, "sampled": node.sampled, "text": family.decode(node.tokens), "tokens": len(node.tokens),
         "trained": len(node.tokens) if id(node) in trained else 0, "discarded": node.discarded,
         **({"context": contexts[node.turn]} if contexts and node.turn >= 0 else {})}
        for node in trajectory.forest
    ]  # fmt: skip


def played_facts(trajectory: Trajectory, family: ModelFamily) -> dict[str, object]:
    """Return a sample's `info`, and its `nodes` if it has several branches; fields without content are left out."""
    facts: dict[str, object] = {"info": dict(trajectory.info)} if trajectory.info else {}
    forest = trajectory.forest
    if len(forest) > 1 + len({node.parent for node in forest} - {None}):  # several nodes without a successor
        facts["nodes"] = nodes(trajectory, family)
    return facts


def shown_tokens(trajectory: Trajectory, family: ModelFamily) -> dict[str, object]:
    """Return a sample's first prompt as it was rendered, and the text of each trained turn, with special tokens."""
    trained, forest = _trained(trajectory), trajectory.forest
    return {
        "rendered": family.decode(forest[0].tokens, skip_special=False) if forest else "",
        "trained": [family.decode(node.tokens, skip_special=False) for node in forest if id(node) in trained],
    }


def _trained(trajectory: Trajectory) -> set[int]:
    return {id(node) for path in trajectory.paths() for node, is_trained in path if is_trained}


def with_agent(overrides: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return overrides that make a program the agent; further options of the environment `agent` stay as configured.

    Arguments that name files become absolute, because the program runs in another folder.
    """
    named = [at > 0 or "/" in word for at, word in enumerate(program)]
    program = [os.path.abspath(word) if may and os.path.isfile(word) else word
               for word, may in zip(program, named, strict=True)]  # fmt: skip
    return [*overrides, "environment.name=agent", f"environment.command={json.dumps(program)}", "environment.function="]


def shown_golds(golds: Mapping[str, GoldResult]) -> dict[str, dict[str, object]]:
    """Return a task's gold answer as JSON data, by reward: as it was read, and what its own responses score."""
    return {
        name: {"read": gold.read, "scores": dict(zip(gold.responses, gold.scores, strict=True)), "fault": gold.fault}
        for name, gold in golds.items()
    }


async def try_reward(
    name: str, options: Sequence[str], data: Path, plugins: Sequence[str], label: str = ""
) -> list[dict[str, Any]]:
    """Score the rows of a JSON file (`prompt`, `response`, fields of the reward); return a record for each row.

    `label`: column with the score that a person gave; it is shown in the record and hidden from the reward.
    """
    run_config = data.parent / "config.toml"  # `data` may lie in a run directory, whose config names plugin files
    if not plugins and run_config.is_file():
        plugins = plugins_of(read_layers([run_config], (), Path.cwd())[0])
    catalogue = Catalogue.load(plugins)
    given = {".".join(path): value for path, value in map(parse_override, options)}
    named: Any = expand(("rewards", "0"), name)
    if "function" in named:
        name, given["function"] = named["name"], named["function"]
    tree = with_origins(given, Origin(COMMAND_LINE, directory=Path.cwd()))
    # Paths are made absolute here, because the reward's process works in another folder.
    reward_options: Any = plain_tree(tree, catalogue.target("reward", name).options_model())
    chosen = Chosen("reward", name, reward_options)
    workers = LocalWorkers(plugins)
    try:
        table = RewardChoice(chosen=chosen)
        return await _scored(table, catalogue, ProcessStarter(workers), {}, None, data, label)
    finally:
        await workers.close()


async def try_run_reward(
    name: str, sources: Sequence[Source], overrides: Sequence[str], data: Path, label: str = ""
) -> list[dict[str, Any]]:
    """Score the rows of a JSON file like `try_reward`, with a reward of a configuration and its pools of `[[engines]]`.

    All pools that rewards and environments use are started, on the devices of the plan; the policy's engines are not.
    """
    with tempfile.TemporaryDirectory(prefix="relax-try-") as directory:
        _, launch, catalogue = try_launch(sources, overrides, Path(directory))
        async with single_role("rollout", launch, catalogue) as context:
            tables = {table.known_as: table for table in context.config.rewards}
            if name not in tables:
                raise ConfigError("relax try reward", name, f"name a reward of the configuration: {', '.join(tables)}")
            pools = AuxiliaryPools.from_context(context, ignore, teaching=False)
            try:
                await pools.start()
                starter = ProcessStarter(context.children)
                return await _scored(
                    tables[name], catalogue, starter, pools.clients, context.config.sandbox, data, label
                )
            finally:
                await pools.close()


async def _scored(
    table: RewardChoice, catalogue: Catalogue, starter: ProcessStarter, models: Mapping[str, ModelClient],
    sandbox: Any, data: Path, label: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """Score the rows of a file with one reward, and return their records.

    With a label, failures are measured: they do not open the circuit breaker.
    """
    needs = cast(Any, type(catalogue.build(table.chosen))).needs_columns
    rows = list(_rows(data, table.name, needs, label))
    sandboxes = SandboxPool(sandbox, starter)
    scorer = RewardScorer([table], starter, SystemClock(), models=models, sandboxes=sandboxes)
    try:
        await scorer.start()
        await sandboxes.start()
        groups = [[row] for row in rows]
        if scorer.judges_groups:
            groups = [list(group) for _, group in groupby(rows, key=lambda row: row.task.id)]
        judged = [(group[0].task, [row.sample for row in group]) for group in groups]
        scored = await scorer.score(judged, counts=not label)
        golds = await scorer.golds([row.task for row in rows])
    finally:
        await scorer.stop()
        await sandboxes.close()
    return [
        {**sample_record(row.task, row.sample, result), "golds": shown_golds(gold)}
        | ({} if row.label is None else {"label": row.label})
        for row, result, gold in zip(rows, chain.from_iterable(scored), golds, strict=True)
    ]


def label_agreement(records: Sequence[Mapping[str, Any]]) -> Agreement:
    """Return how well the scores of `try_reward` agree with the labels of the rows."""
    return agreement([Labelled(row["task_id"], row["label"], row["reward"], row.get("rewards", {})) for row in records])


class GivenSample(NamedTuple):
    """A row of a file of responses. `label`: score that a person gave; None if no label was asked for."""

    task: Task
    sample: Trajectory
    label: float | None


def _rows(data: Path, reward: str, needs: Sequence[str], label: str) -> Iterator[GivenSample]:
    """Yield the tasks and samples of a file: one JSON object per line, or the single object of a `.json` file."""
    try:
        with unpacked(data)[0] as file:
            content = file.read()
    except OSError as error:
        raise ConfigError("--data", data, f"can't be read ({error.strerror}); name a JSON lines file") from error
    for number, line in enumerate([content] if data.suffix == ".json" else content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{data}:{number}"
        try:
            row = plain(read_json(line))
            row = {**row, **row.pop("task")} if isinstance(row.get("task"), dict) else row
            prompt, response = row.pop("prompt"), row.pop("response")
            if not isinstance(response, str):
                raise ValueError("response is not text")
            is_text = isinstance(prompt, str)
            turns = [{"role": "user", "content": prompt}] if is_text else prompt
            messages = [Message(m["role"], m["content"]) for m in turns]
            given = row.pop(label, None) if label else None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            fix = f"write each row as a JSON object with prompt and response ({error})"
            raise ConfigError("--data", where, fix) from error
        if label and not (isinstance(given, int | float) and abs(given) <= sys.float_info.max):
            raise ConfigError("--label", f"{where}: {label} = {given!r}", "label each row with a number, true or false")
        for column in needs:
            if not has_value(row.get(column)):
                got = f"{where} without a value for {column!r}, which {reward} reads"
                raise ConfigError("--data", got, f"give each row a value for {column!r}")
        task = Task(str(row.pop("id", where)), prompt if is_text else tuple(messages), row.pop("answer", None), row)
        sample = Trajectory((*messages, Message("assistant", response)), response, ())
        yield GivenSample(task, sample, None if given is None else float(given))
