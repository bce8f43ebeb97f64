# SPDX-License-Identifier: Apache-2.0
"""The verbs `relax graph | plan | doctor | try`, which examine a configuration without training.

`graph` prints the operations; `plan` the placement, memory and time; `doctor` checks of the machine; `try` a few
samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import AsJson, Sources, print_json, print_table, say, split
from relax_core.observe.console import run_to_end

if TYPE_CHECKING:
    from relax_core.api.checks import CheckFinding
    from relax_core.config.layers import Source
    from relax_core.control.memory_check import ProcessNeed
    from relax_core.control.prepare import PlannedRun
    from relax_core.diagnostics.agreement import Agreement
    from relax_core.diagnostics.estimate import RunEstimate


def graph(
    arguments: Sources, form: Annotated[str, typer.Option("--format", help="Output: text, mermaid or json.")] = "text"
) -> None:
    """Draw the graph of a configuration's operations."""
    from relax_core.control.prepare import plan_run

    if form not in ("text", "mermaid", "json"):
        raise ConfigError("--format", repr(form), "choose text, mermaid or json")
    planned = plan_run(*split(arguments))
    for notice in planned.composed.notices:
        say(notice, err=True)
    for line in _graph_lines(planned, form):
        say(line)


def _graph_lines(planned: PlannedRun, form: str = "text") -> Iterator[str]:
    """Yield the operations of each stage as text, mermaid or json."""
    from relax_core.control.planner import draw, mermaid

    plans = {stage.name: stage.plan for stage in planned.stages}
    if form == "json":
        drawn = {
            name: [
                {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(one).items()}
                for one in found.operations
            ]
            for name, found in plans.items()
        }
        yield json.dumps(drawn if len(drawn) > 1 else next(iter(drawn.values())))
        return
    for name, found in plans.items():
        if name:
            yield f"{'stage ' if form == 'text' else '%% stage '}{name}"
        yield draw(found.operations) if form == "text" else mermaid(found.operations)
        yield from (f"note: {note}" for note in found.notes if form == "text")


def tool_lines(planned: PlannedRun) -> Iterator[str]:
    """Yield the tools that environments discover, and for each source the digest that pins its tools.

    Raises ConfigError if the policy's chat template cannot call tools. A recipe has no model yet, so its template is
    not checked.
    """
    from relax_core.api.environment import tools_digest
    from relax_core.config.compose import naming_stage
    from relax_core.control.tool_check import check_tool_calls, tools_before_start

    for at, stage in enumerate(planned.stages):
        if planned.recipe is None:
            with naming_stage(at if stage.name else None):
                check_tool_calls(stage.config, planned.catalogue, stage.plan)
        for name, tools in tools_before_start(stage.config, planned.catalogue).items():
            for source in dict.fromkeys(tool.source for tool in tools):
                own = [tool for tool in tools if tool.source == source]
                origin = f"environment {name}{', ' * bool(source)}{source}"
                yield f"{origin}: {', '.join(tool.name for tool in own)}; digest {tools_digest(own)}"


def _data_lines(planned: PlannedRun) -> Iterator[str]:
    """Open the task files as the run would, with every check of rows and columns, and yield the numbers of rows.

    Raises ConfigError for the first row that the run would refuse. A recipe has no files yet.
    """
    from relax_core.config.compose import naming_stage
    from relax_core.control.data_check import open_data

    if planned.recipe is not None:
        yield "data: not checked, because the run itself makes the files of a recipe"
        return
    for at, stage in enumerate(planned.stages):
        with naming_stage(at if stage.name else None):
            opened = open_data(stage.config, planned.catalogue, stage.plan)
            yield from (f"data: {text}" for text in (f"{stage.config.data.train}: {opened}", *opened.compared))


def check_all(planned: PlannedRun) -> tuple[str, ...]:
    """Check sinks, tools, data and the plugins' checks as a run does; return all results as lines. Raises RelaxError."""
    from relax_core.control.prepare import check_sinks

    check_sinks(planned.composed.config, planned.catalogue)
    notices = (f"note: {notice}" for notice in planned.composed.notices)
    lines = (*notices, *_graph_lines(planned), *tool_lines(planned), *_data_lines(planned))
    return (*lines, *(f"warning: {notice}" for notice in planned.preflight()))


def dry_run(sources: Sequence[Source], overrides: Sequence[str]) -> None:
    """Make every check of a configuration, start nothing, and print the graph, tools and data if nothing is wrong."""
    from relax_core.config.compose import naming_stage
    from relax_core.control.prepare import plan_run
    from relax_core.diagnostics.doctor import check_starts

    planned = plan_run(sources, overrides)
    lines = check_all(planned)
    say("relax: importing the engine and the trainer, each in its own interpreter", err=True)
    for at, stage in enumerate(planned.stages):
        with naming_stage(at if stage.name else None):
            for one in check_starts(stage.config, planned.catalogue, stage.plan):
                if one.wrong:
                    raise ConfigError(one.table, f"{one.what}: {one.wrong}", one.fix)
    for line in lines:
        say(line)


def plan(
    arguments: Sources,
    as_json: AsJson = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Exit with 0 even if the run does not fit in memory.")
    ] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Compare the layouts of the trainer's ranks, the fastest that fits first.")
    ] = False,
    gpus: Annotated[
        int, typer.Option(min=0, help="With --layouts: GPUs of the trainer, one a rank; 0: this machine's.")
    ] = 0,
    gpu_memory: Annotated[
        float, typer.Option(min=0, help="With --layouts: GiB of memory of one GPU; 0: as this machine's.")
    ] = 0.0,
    gpu_tflops: Annotated[
        float, typer.Option(min=0, help="With --layouts: TFLOP/s of one GPU; 0: measured, or 400 for other GPUs.")
    ] = 0.0,
    link: Annotated[
        float, typer.Option(min=0, help="With --layouts: GB/s that a rank sends; 0: 200 for GPUs, 1 for CPUs.")
    ] = 0.0,
) -> None:
    """Estimate placement, memory and time of a run, or compare layouts.

    The exit code is 2 if the run, or every layout, does not fit in memory.
    """
    given = {"--gpus": gpus, "--gpu-memory": gpu_memory, "--gpu-tflops": gpu_tflops, "--link": link}
    for name, value in given.items():
        if value and not layouts:
            raise ConfigError(name, f"{value:g} without --layouts", "add --layouts: only layouts are compared for it")
    from relax_core.diagnostics.estimate import estimate_run

    if layouts:
        from relax_core.cli.layouts import print_layouts

        print_layouts(*split(arguments), gpus, gpu_memory, gpu_tflops, link, as_json=as_json, anyway=anyway)
        return

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
        "notes": [*estimate.notices, *estimate.plan.notes],
    }


def _print_plan(estimate: RunEstimate) -> None:
    from relax_core.control.memory_check import gib

    say(f"placement {estimate.plan.mode}; each line is a group of processes that fail together")
    groups = [need.group for need in estimate.needs]
    rows = [(group.name, str(group.size), ", ".join(sorted(group.devices))) for group in groups]
    print_table(("group", "processes", "on"), rows)
    say(f"\nmemory of one process, with prompts of up to {estimate.prompt_tokens} tokens (without its libraries)")
    print_table(("group", "phase", "peak", "of which"), [row for need in estimate.needs for row in _phases(need)])
    notes = (f"{need.group.name}: {note}" for need in estimate.needs for one in need.processes for note in one.notes)
    for note in dict.fromkeys(notes):
        say(f"note: {note}")
    say("\nmemory in total")
    for budget in estimate.budgets:
        available = f"of {gib(budget.available)}" if budget.available else "(available memory is unknown)"
        say(f"{budget.name}: {gib(budget.needed)} {available}{'' if budget.fits else ', does not fit'}")
    if estimate.flops_per_s:
        rate = f"{estimate.flops_per_s / 1e9:.0f} GFLOP/s of float32 a process"
        say(f"\nminimum time of a step: its matrix products at {rate}, measured now; small models take much longer")
        for one in estimate.durations:
            say(f"{one.group} {one.phase}: {one.flops / 1e9:.3g} GFLOP, at least {one.least_s:.2g} s")
    for note in (*estimate.notices, *estimate.plan.notes):
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
        list[str] | None, typer.Argument(metavar="[FILES...] [KEY=VALUE]...", help="A configuration to check as well.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the machine, the installation and a configuration."""
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


SHOWN_TEXT = 100
"""Most characters of a node's text that a tree shows."""


class WithCommand(TyperCommand):
    """A verb that accepts a program with its arguments after `--`, and stores them in the context's `obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.obj = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


trying = typer.Typer()


@trying.command(cls=WithCommand)
def try_(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(help="TOML files and overrides; or: reward NAME [FILES]; or: agent FILES -- PROGRAM ARGUMENTS."),
    ],
    tasks: Annotated[int, typer.Option(help="Number of tasks to generate for.")] = 4,
    data: Annotated[
        Path | None, typer.Option(help="For `reward`: JSON lines with `response`, or failing-sample.json.")
    ] = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="For `reward`: a single-file plugin; repeatable.")] = None,
    label: Annotated[
        str,
        typer.Option(help="For `reward`: column of --data with a person's score; prints how well the scores agree."),
    ] = "",
    tree: Annotated[
        bool, typer.Option("--tree", help="Show each sample's tokens as a tree, with the trained and discarded ones.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate, score and print a few samples without training, and check template, tokenizer, mask and answers.

    `relax try reward NAME --data FILE` only scores the responses in FILE. `relax try reward NAME FILES --data FILE` does
    so with the reward and the engine pools of a configuration, such as a judge. `relax try agent FILES -- PROGRAM` runs
    PROGRAM as the agent and shows its model calls as a tree.
    """
    from relax_core.diagnostics.try_run import label_agreement, try_reward, try_run_reward, try_tasks, with_agent
    from relax_core.observe.first_step import ROUND_TRIP, fault_lines, passed_line

    program: list[str] = context.obj or []
    records: Sequence[dict[str, Any]]
    checks: Sequence[CheckFinding] = ()
    warnings: Sequence[str] = ()
    if program and arguments[0] != "agent":
        raise ConfigError("relax try", f"a program after --: {program[0]}", "write relax try agent FILES -- PROGRAM")
    if label and arguments[0] != "reward":
        raise ConfigError(
            "--label", label, "labels are compared with a reward: write relax try reward NAME --data FILE"
        )
    if arguments[0] == "agent":
        sources, overrides = split(arguments[1:])
        overrides = with_agent(overrides, program) if program else overrides
        records, checks, warnings = run_to_end(try_tasks(sources, overrides, tasks))
        tree = True
    elif arguments[0] == "reward":
        reward, *options = arguments[1:] or [""]
        if not reward or data is None:
            raise ConfigError("relax try reward", " ".join(arguments[1:]) or "nothing", "give NAME and --data FILE")
        plugins = [str(path.absolute()) for path in plugin or ()]
        sources, overrides = split(options)
        if sources and plugins:
            raise ConfigError("--plugin", plugins[0], "list it in the configuration instead: plugins = [...]")
        if sources:
            records = run_to_end(try_run_reward(reward, sources, overrides, data, label))
        else:
            records = run_to_end(try_reward(reward, options, data, plugins, label))
    else:
        records, checks, warnings = run_to_end(try_tasks(*split(arguments), tasks))
    for warning in warnings:
        say(f"relax: warning: {warning}", err=True)
    first = {record.get("group_id"): record for record in reversed(records)}  # of each task, whose prompt is shown
    texts = [_record_text(record, tree, record is first[record.get("group_id")]) for record in records]
    lines = [line for line in (passed_line(checks), *fault_lines(checks)) if line]
    document: Any = records
    if label and arguments[0] == "reward":
        agreed = label_agreement(records)
        document = {"samples": records, "agreement": asdict(agreed)}
        lines += _agreement_lines(label, agreed)
    say(json.dumps(document) if as_json else "\n\n".join([*texts, *lines]))
    if as_json:
        for fault in fault_lines(checks):
            say(fault, err=True)
    if any(check.name == ROUND_TRIP and check.state == "failed" for check in checks):
        raise typer.Exit(2)


def _record_text(record: dict[str, Any], tree: bool = False, first: bool = False) -> str:
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    named = [(name, record.get(name)) for name in ("prompt", "response", "answer", "error")]
    lines = [f"  {name}: {value}" for name, value in named if value is not None]
    if first and record.get("rendered"):
        lines.append(f"  rendered prompt: {_shortened(record['rendered'])}")
        lines += [f"  trained: {_shortened(text)}" for text in record["trained"]]
    lines += [_gold_line(name, gold) for name, gold in record.get("golds", {}).items()]
    details = [*_tree_lines(record["nodes"]), *_agent_lines(record["info"].get("agent", {}))] if tree else []
    return "\n".join([f"task {record['task_id']}  {reward}  {record['outcome']}", *lines, *details])


def _agreement_lines(label: str, agreed: Agreement) -> list[str]:
    """Return one paragraph on the agreement of scores and labels; figures that are not defined are left out."""
    figures = {name: getattr(agreed, name) for name in ("accuracy", "kappa", "spearman", "pairs")}
    figures |= agreed.parts
    shown = [f"  {name}: {value:.3g}" for name, value in figures.items() if value is not None]
    return ["\n".join([f"{agreed.samples} samples against {label}, {agreed.failed:.1%} without a score", *shown])]


def _gold_line(reward: str, gold: dict[str, Any]) -> str:
    """Return one line on a task's gold answer: as the reward read it, and what it scores as a response."""
    scores = ", ".join(f"{score:g} for {response!r}" for response, score in gold["scores"].items())
    if gold["fault"] and not scores:
        return f"  gold: {reward}: {gold['fault']}"
    return f"  gold: {reward} reads {gold['read']}" + (f"; it scores {scores}" if scores else "")


def _tree_lines(nodes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a sample's nodes as lines of a tree, each below its parent; an only child has the depth of its parent."""
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
    """Yield lines on the agent's model calls: their number, the forks with reasons, and ignored request fields."""
    if agent:
        yield f"  calls: {', '.join(f'{count} {reason}' for reason, count in agent['calls'].items()) or 'none'}"
    for fork in agent.get("forks", ()):
        equals = f" (call {fork['equals'] + 1})" if "equals" in fork else ""
        yield f"  call {fork['call'] + 1} is {fork['reason']}{equals}: {fork['why']}"
    if ignored := agent.get("overridden"):
        yield f"  the run's settings replace the client's: {', '.join(ignored)}"


def _shortened(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False)
    return shown if len(shown) <= SHOWN_TEXT else f"{shown[: SHOWN_TEXT // 2]} ... {shown[-SHOWN_TEXT // 2 :]}"
