# SPDX-License-Identifier: Apache-2.0
"""Every check that a run makes before its start, with the results as lines of text. No role is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from relax_core.api.environment import tools_digest
from relax_core.api.errors import ConfigError
from relax_core.config.compose import naming_stage
from relax_core.control.data_check import open_data
from relax_core.control.planner import draw, mermaid
from relax_core.control.prepare import PlannedRun, check_sinks
from relax_core.control.start_check import check_starts
from relax_core.control.tool_check import check_tool_calls, tools_before_start


def check_all(planned: PlannedRun) -> tuple[str, ...]:
    """Check sinks, tools, data and the plugins' checks as a run does; return the results as lines. Raises RelaxError."""
    check_sinks(planned.composed.config, planned.catalogue)
    notices = (f"note: {notice}" for notice in planned.composed.notices)
    lines = (*notices, *graph_lines(planned), *tool_lines(planned), *_data_lines(planned))
    return (*lines, *(f"warning: {notice}" for notice in planned.preflight()))


def check_imports(planned: PlannedRun) -> None:
    """Import engines and trainers, each in its own interpreter. Raises ConfigError for the first that can't start."""
    for index, stage in enumerate(planned.stages):
        with naming_stage(index if stage.name else None):
            for check in check_starts(stage.config, planned.catalogue, stage.plan):
                if check.wrong:
                    raise ConfigError(check.table, f"{check.what}: {check.wrong}", check.fix)


def graph_lines(planned: PlannedRun, form: str = "text") -> Iterator[str]:
    """Yield the operations of each stage as text, mermaid or json."""
    plans = {stage.name: stage.plan for stage in planned.stages}
    if form == "json":
        drawn = [
            [
                {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(each).items()}
                for each in plan.operations
            ]
            for plan in plans.values()
        ]
        yield json.dumps(dict(zip(plans, drawn, strict=True)) if len(drawn) > 1 else drawn[0])
        return
    for name, plan in plans.items():
        if name:
            yield f"{'stage ' if form == 'text' else '%% stage '}{name}"
        yield draw(plan.operations) if form == "text" else mermaid(plan.operations)
        yield from (f"note: {note}" for note in plan.notes if form == "text")


def tool_lines(planned: PlannedRun) -> Iterator[str]:
    """Yield the tools that environments discover, and for each source the digest that pins its tools.

    Raises ConfigError if the policy's chat template cannot call tools. A recipe has no model yet, so its template is
    not checked.
    """
    for index, stage in enumerate(planned.stages):
        if planned.recipe is None:
            with naming_stage(index if stage.name else None):
                check_tool_calls(stage.config, planned.catalogue, stage.plan)
        for name, tools in tools_before_start(stage.config, planned.catalogue).items():
            for source in dict.fromkeys(tool.source for tool in tools):
                listed = [tool for tool in tools if tool.source == source]
                origin = f"environment {name}{', ' * bool(source)}{source}"
                yield f"{origin}: {', '.join(tool.name for tool in listed)}; digest {tools_digest(listed)}"


def _data_lines(planned: PlannedRun) -> Iterator[str]:
    """Open the task files as the run would, with every check of rows and columns, and yield the numbers of rows.

    Raises ConfigError for the first row that the run would refuse. A recipe has no files yet.
    """
    if planned.recipe is not None:
        yield "data: not checked, because the run itself makes the files of a recipe"
        return
    for index, stage in enumerate(planned.stages):
        with naming_stage(index if stage.name else None):
            opened = open_data(stage.config, planned.catalogue, stage.plan)
            yield from (f"data: {text}" for text in (f"{stage.config.data.train}: {opened}", *opened.compared))
