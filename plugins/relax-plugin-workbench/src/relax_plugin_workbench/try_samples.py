# SPDX-License-Identifier: Apache-2.0
"""The verb `relax try`, which prints a few scored samples of a configuration, a reward or an agent without training."""

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
from relax_core.cli.terminal import AsJson, run_to_end, say, split

if TYPE_CHECKING:
    from relax_core.api.checks import CheckFinding

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
    from relax_core.runs import ROUND_TRIP, fault_lines, passed_line
    from relax_plugin_workbench.try_run import label_agreement, try_reward, try_run_reward, try_tasks, with_agent

    program: list[str] = context.obj or []
    records: Sequence[dict[str, Any]]
    checks: Sequence[CheckFinding] = ()
    warnings: Sequence[str] = ()
    if program and arguments[0] != "agent":
        raise ConfigError("relax try", f"a program after --: {program[0]}", "write relax try agent FILES -- PROGRAM")
    if label and arguments[0] != "reward":
        fix = "labels are compared with a reward: write relax try reward NAME --data FILE"
        raise ConfigError("--label", label, fix)
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
    faults = fault_lines(checks)
    lines = [line for line in (passed_line(checks), *faults) if line]
    document: Any = records
    if label:
        agreed = label_agreement(records)
        document = {"samples": records, "agreement": asdict(agreed)}
        figures = {name: getattr(agreed, name) for name in ("accuracy", "kappa", "spearman", "pairs")}
        figures |= agreed.parts
        shown = [f"  {name}: {value:.3g}" for name, value in figures.items() if value is not None]
        title = f"{agreed.samples} samples against {label}, {agreed.failed:.1%} without a score"
        lines.append("\n".join([title, *shown]))
    say(json.dumps(document) if as_json else "\n\n".join([*texts, *lines]))
    for fault in faults if as_json else ():
        say(fault, err=True)
    if any(check.name == ROUND_TRIP and check.state == "failed" for check in checks):
        raise typer.Exit(2)


def _record_text(record: dict[str, Any], tree: bool, first: bool) -> str:
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    named = [(name, record.get(name)) for name in ("prompt", "response", "answer", "error")]
    lines = [f"  {name}: {value}" for name, value in named if value is not None]
    if first and record.get("rendered"):
        lines.append(f"  rendered prompt: {_shortened(record['rendered'])}")
        lines += [f"  trained: {_shortened(text)}" for text in record["trained"]]
    lines += [_gold_line(name, gold) for name, gold in record.get("golds", {}).items()]
    details = [*_tree_lines(record["nodes"]), *_agent_lines(record["info"].get("agent", {}))] if tree else []
    return "\n".join([f"task {record['task_id']}  {reward}  {record['outcome']}", *lines, *details])


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
