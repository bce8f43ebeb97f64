# SPDX-License-Identifier: Apache-2.0
"""`relax graph | plan | doctor | try | bench`: a configuration looked at without a run: its operations, who runs where,
memory and time, the machine beneath, a few samples, and how far its engine is from its trainer. Nothing is trained.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import AsJson, Sources, print_json, print_table, say, split

if TYPE_CHECKING:
    from relax_core.control.memory_check import ProcessNeed
    from relax_core.diagnostics.estimate import RunEstimate
    from relax_core.diagnostics.mismatch import MismatchReport


def graph(
    arguments: Sources, form: Annotated[str, typer.Option("--format", help="text, mermaid or json")] = "text"
) -> None:
    """Draw the graph of operations."""
    if form not in ("text", "mermaid", "json"):
        raise ConfigError("--format", repr(form), "choose text, mermaid or json")
    print_graph(*split(arguments), form)


def print_graph(sources: Sequence[str], overrides: Sequence[str], form: str = "text") -> None:
    """Print the operations of a configuration that may not have its files yet, as text, mermaid or json."""
    from relax_core.control.planner import draw, mermaid
    from relax_core.control.prepare import plan_run

    plans = {stage.name: stage.plan for stage in plan_run(sources, overrides).stages}
    if form == "json":
        drawn = {
            name: [
                {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(one).items()}
                for one in found.operations
            ]
            for name, found in plans.items()
        }
        say(json.dumps(drawn if len(drawn) > 1 else next(iter(drawn.values()))))
        return
    for name, found in plans.items():
        if name:
            say(f"{'stage ' if form == 'text' else '%% stage '}{name}")
        say(draw(found.operations) if form == "text" else mermaid(found.operations))
        for note in found.notes if form == "text" else ():
            say(f"note: {note}")


def print_tools(sources: Sequence[str], overrides: Sequence[str]) -> None:
    """Print the tools that environments find, and the digest by which a configuration may hold them fast; refuse any that the
    policy has no way of calling, where the files of the model are there."""
    from relax_core.api.environment import tools_digest
    from relax_core.config.compose import naming_stage
    from relax_core.control.prepare import plan_run
    from relax_core.control.tool_check import check_tool_calls, tools_before_start

    planned = plan_run(sources, overrides)
    for at, stage in enumerate(planned.stages):
        if planned.recipe is None:
            with naming_stage(at if stage.name else None):
                check_tool_calls(stage.config, planned.catalogue, stage.plan)
        for name, tools in tools_before_start(stage.config, planned.catalogue).items():
            for source in dict.fromkeys(tool.source for tool in tools):
                own = [tool for tool in tools if tool.source == source]
                origin = f"environment {name}{', ' * bool(source)}{source}"
                say(f"{origin}: {', '.join(tool.name for tool in own)}; digest {tools_digest(own)}")


def plan(
    arguments: Sources,
    as_json: AsJson = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Exit 0 also where it can't fit.")] = False,
) -> None:
    """Foretell placement, memory and time of a run; exit 2 where it can't fit."""
    from relax_core.diagnostics.estimate import estimate_run

    stages = estimate_run(*split(arguments))
    if as_json:
        documents = [
            {**_plan_document(estimate), **({"stage": estimate.stage} if estimate.stage else {})} for estimate in stages
        ]
        print_json(documents[0] if len(documents) == 1 else {"schema": "relax.plan/1", "stages": documents})
    for estimate in () if as_json else stages:
        if estimate.stage:
            say(f"stage {estimate.stage}")
        _print_plan(estimate)
    for estimate in () if anyway else stages:
        estimate.check()


def _plan_document(estimate: RunEstimate) -> dict[str, Any]:
    return {
        "schema": "relax.plan/1",
        "fits": all(budget.fits for budget in estimate.budgets),
        "mode": estimate.plan.mode,
        "prompt_tokens": estimate.prompt_tokens,
        "groups": [
            {
                "name": need.group.name,
                "processes": need.group.size,
                "threads": need.group.threads,
                "devices": sorted(need.group.devices),
                "unknown": need.unknown,
                "estimates": [{"phases": one.phases, "notes": list(one.notes)} for one in need.processes],
            }
            for need in estimate.needs
        ],
        "memory": [
            {"name": one.name, "needed": one.needed, "available": one.available, "largest": one.largest}
            for one in estimate.budgets
        ],
        "flops_per_s": estimate.flops_per_s,
        "step": [
            {"group": one.group, "phase": one.phase, "flops": one.flops, "least_s": one.least_s}
            for one in estimate.durations
        ],
        "notes": list(estimate.plan.notes),
    }


def _print_plan(estimate: RunEstimate) -> None:
    from relax_core.control.memory_check import gib

    say(f"placement {estimate.plan.mode}; each line is what dies together")
    groups = [need.group for need in estimate.needs]
    rows = [(group.name, str(group.size), ", ".join(sorted(group.devices))) for group in groups]
    print_table(("group", "processes", "on"), rows)
    say(f"\nmemory of one process, with prompts of up to {estimate.prompt_tokens} tokens (beside its libraries)")
    print_table(("group", "phase", "peak", "of which"), [row for need in estimate.needs for row in _phases(need)])
    notes = (f"{need.group.name}: {note}" for need in estimate.needs for one in need.processes for note in one.notes)
    for note in dict.fromkeys(notes):
        say(f"note: {note}")
    say("\nmemory together")
    for budget in estimate.budgets:
        beside = f"of {gib(budget.available)}" if budget.available else "(how much there is, is not known here)"
        say(f"{budget.name}: {gib(budget.needed)} {beside}{'' if budget.fits else ', too much'}")
    if estimate.flops_per_s:
        rate = f"{estimate.flops_per_s / 1e9:.0f} GFLOP/s of float32 a process"
        say(
            f"\nleast time of a step: its multiplications at {rate}, measured just now; small models take several times it"
        )
        for one in estimate.durations:
            say(f"{one.group} {one.phase}: {one.flops / 1e9:.3g} GFLOP, {one.least_s:.2g} s at least")
    for note in estimate.plan.notes:
        say(f"note: {note}")


def _phases(need: ProcessNeed) -> Iterator[tuple[str, str, str, str]]:
    from relax_core.control.memory_check import gib

    if not need.processes:
        yield need.group.name, "-", "-", need.unknown
        return
    for phase, parts in need.processes[0].phases.items():
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        of_which = ", ".join(f"{name} {gib(size)}" for name, size in ordered)
        yield need.group.name, phase, gib(sum(parts.values())), of_which


def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[FILES...] [KEY=VALUE]...", help="A configuration to check too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Exit 0 where all is well, 2 for the installation or the configuration, 4 for the machine."""
    from relax_core.diagnostics.doctor import Finding, findings

    found: list[Finding] = []
    for finding in findings(*split(arguments or [])):
        found.append(finding)
        if not as_json:
            say(finding.line)
    code = next((finding.exit_code for finding in found if finding.exit_code), 0)
    if as_json:
        rows = [{"ok": not finding.exit_code, **asdict(finding)} for finding in found]
        print_json({"schema": "relax.doctor/1", "ok": not code, "exit_code": code, "findings": rows})
    raise typer.Exit(code)


verbs = typer.Typer(help="Measure what a configuration does here.", no_args_is_help=True)
SHOWN_TASKS = 5
SHOWN_TEXT = 100
"""Characters of a node's text in a tree."""
COLUMNS = ("trainer", "engine", "replay", "mean", "p99", "max", "k3-KL", "ratio", "tokens")


class WithCommand(TyperCommand):
    """A verb that takes a program with its arguments behind ` -- `; they are in the context's `obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.obj = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


def try_(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(help="TOML files and overrides; or: reward NAME; or: agent FILES -- PROGRAM ARGUMENTS."),
    ],
    tasks: Annotated[int, typer.Option(help="How many tasks to generate for.")] = 4,
    data: Annotated[
        Path | None, typer.Option(help="For a reward: JSON lines with `response`, or failing-sample.json.")
    ] = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="For a reward: a single-file plugin.")] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show each sample's tokens as branches: what is trained, and why not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """A few rollouts scored and printed; `relax try reward NAME --data FILE` scores alone, and with
    `relax try agent FILES -- PROGRAM` a program is the agent, whose calls are shown as a tree."""
    from relax_core.diagnostics.trial import reward_trial, trial, with_agent

    program: list[str] = context.obj or []
    records: Sequence[dict[str, Any]]
    of_answers: Iterable[str]
    if program and arguments[0] != "agent":
        raise ConfigError("relax try", f"a program behind --: {program[0]}", "write relax try agent FILES -- PROGRAM")
    if arguments[0] == "agent":
        sources, overrides = split(arguments[1:])
        overrides = with_agent(overrides, program) if program else overrides
        records = asyncio.run(trial(sources, overrides, tasks))
        tree, of_answers = True, ()
    elif arguments[0] == "reward":
        reward, *options = arguments[1:] or [""]
        if not reward or data is None:
            raise ConfigError("relax try reward", " ".join(arguments[1:]) or "nothing", "give NAME and --data FILE")
        plugins = [str(path) for path in plugin or ()]
        records = asyncio.run(reward_trial(reward, options, data, plugins))
        of_answers = ()
    else:
        records = asyncio.run(trial(*split(arguments), tasks))
        of_answers = _verifiable(records)
    texts = [_record_text(record, tree) for record in records]
    say(json.dumps(records) if as_json else "\n\n".join([*texts, *of_answers]))


def _verifiable(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say in how many tasks the answer that the file gives earns as much as the best sample; nothing where none has any."""
    earned = {one["group_id"]: one["answer_reward"] for one in records if one.get("answer_reward") is not None}
    judged = [one for one in records if one["reward"] is not None and one["group_id"] in earned]
    less = {one["group_id"]: one for one in judged if earned[one["group_id"]] < one["reward"]}
    if not earned:
        return
    yield f"the answer of the task file earns as much as the best sample in {len(earned) - len(less)} of {len(earned)} tasks"
    if less:
        names = ", ".join(str(one["task_id"]) for one in list(less.values())[:SHOWN_TASKS])
        yield f"not so in {names}: is the answer right, and does the reward read it as it stands there?"


def _record_text(record: dict[str, Any], tree: bool = False) -> str:
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    named = [(name, record.get(name)) for name in ("prompt", "response", "answer", "error")]
    lines = [f"  {name}: {value}" for name, value in named if value is not None]
    told = [*_tree_lines(record["nodes"]), *_agent_lines(record["info"].get("agent", {}))] if tree else []
    return "\n".join([f"task {record['task_id']}  {reward}  {record['outcome']}", *lines, *told])


def _tree_lines(nodes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Draw a sample's tokens: a node a line, below the one that it goes on from; where a node has one successor, it stands at
    the same depth."""
    successors = Counter(node["parent"] for node in nodes)
    depths: list[int] = []
    yield f"  tokens: {sum(node['trained'] for node in nodes)} trained of {sum(node['tokens'] for node in nodes)}"
    for node in nodes:
        parent = node["parent"]
        depths.append(0 if parent is None else depths[parent] + (successors[parent] > 1))
        why = f"policy, {node['discarded']}" if node["discarded"] else "policy" if node["sampled"] else "given"
        trained = f"{node['trained']} of {node['tokens']} trained" if node["sampled"] else f"{node['tokens']} tokens"
        yield f"  {'  ' * depths[-1]}{'+' if parent is None else '-'} {why}, {trained}: {_shortened(node['text'])}"


def _agent_lines(agent: dict[str, Any]) -> Iterator[str]:
    """Say how the agent's calls came to their branches, as its environment noted it."""
    if agent:
        yield f"  calls: {', '.join(f'{count} {reason}' for reason, count in agent['calls'].items()) or 'none'}"
    for fork in agent.get("forks", ()):
        yield f"  call {fork['call'] + 1} is {fork['reason']}: {fork['why']}"
    if ignored := agent.get("overridden"):
        yield f"  not the client's but the run's own: {', '.join(ignored)}"


def _shortened(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False)
    return shown if len(shown) <= SHOWN_TEXT else f"{shown[: SHOWN_TEXT // 2]} ... {shown[-SHOWN_TEXT // 2 :]}"


@verbs.callback()
def bench() -> None:
    """Measure what a configuration does here."""


@verbs.command("mismatch")
def mismatch(
    arguments: Sources,
    samples: Annotated[int, typer.Option(min=1, help="How many samples, rounded up to whole groups.")] = 64,
    compare: Annotated[
        bool, typer.Option("--compare", help="Every pair of number formats; of experts, with and without replay.")
    ] = False,
    formats: Annotated[str, typer.Option(help="Of --compare: which formats, with commas between.")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure how far its engine's log-probs are from its trainer's, on the same tokens and weights: |difference|, and KL."""
    from relax_core.diagnostics.mismatch import FORMATS, mismatch as measure

    chosen = tuple(name.strip() for name in formats.split(",") if name.strip())
    for name in chosen:
        if name not in FORMATS:
            raise ConfigError("--formats", name, f"write some of {', '.join(FORMATS)}, with commas between")
    reports = asyncio.run(measure(*split(arguments), samples, chosen or (FORMATS if compare or formats else ())))
    if as_json:
        print_json({"schema": "relax.mismatch/1", "settings": [mismatch_document(report) for report in reports]})
    else:
        _print_mismatch(reports)


def mismatch_document(report: MismatchReport) -> dict[str, Any]:
    """Give one setting's report as `--json` prints it."""
    setting = {"trainer": report.setting.trainer, "engine": report.setting.engine, "replay": report.setting.replay}
    if report.found is None:
        return {**setting, "refused": report.refused}
    return {**setting, **report.found.plain(), **({} if report.rerouted is None else {"rerouted": report.rerouted})}


def _print_mismatch(reports: list[MismatchReport]) -> None:
    rows = []
    for report in reports:
        setting, found = report.setting, report.found
        if found is not None:
            rows.append({
                "trainer": setting.trainer, "engine": setting.engine, "replay": "yes" if setting.replay else "no",
                "mean": f"{found.mean:.3g}", "p99": f"{found.p99:.3g}", "max": f"{found.max:.3g}",
                "k3-KL": f"{found.k3_kl:.3g}", "ratio": f"{found.ratio_min:.4g} to {found.ratio_max:.4g}",
                "tokens": str(found.tokens),
            })  # fmt: skip
    replays = any(report.setting.replay for report in reports)
    shown = tuple(name for name in COLUMNS if name != "replay" or replays)
    print_table(shown, [tuple(row[name] for name in shown) for row in rows])
    for report in reports:
        if report.found is None:
            say(f"{report.setting.trainer} / {report.setting.engine} can't run: {report.refused}")
    for report in reports:
        if report.rerouted is not None and not report.setting.replay:
            pair = f"{report.setting.trainer} / {report.setting.engine}"
            say(f"{pair}: {report.rerouted:.2%} of the tokens visit other experts")
    if len(reports) == 1 and reports[0].found is not None:
        say("mean by place in the sample:")
        for end, mean in reports[0].found.positions:
            say(f"  before token {end}: {mean:.3g}")
