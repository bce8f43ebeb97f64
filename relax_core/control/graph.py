# SPDX-License-Identifier: Apache-2.0
"""The graph, computed from data: which operations an algorithm needs, and in which order columns come to exist.

It is over operations and acyclic within a step; weights cross steps. Nothing here starts or places anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from relax_core.api.errors import ConfigError
from relax_core.api.role import Operation


def select(operations: Sequence[Operation], goals: Mapping[str, Iterable[str]]) -> tuple[Operation, ...]:
    """The goals and whatever produces columns for them, producers before consumers.

    `goals` names operations, each with the columns that it needs beyond its own. Raises ConfigError for a column that
    nothing produces, one that two produce alike, and a cycle.
    """
    by_name = {operation.name: operation for operation in operations}
    chosen: dict[str, Operation] = {}
    producers: dict[str, list[str]] = {}
    open_columns: list[str] = []
    for goal, more in goals.items():
        if goal not in by_name:
            raise ConfigError("roles", f"a need for {goal!r}", f"no role offers it, only {', '.join(sorted(by_name))}")
        chosen[goal] = replace(by_name[goal], consumes=by_name[goal].consumes | frozenset(more))
        open_columns += sorted(chosen[goal].consumes)
    while open_columns:
        column = open_columns.pop()
        if column in producers:
            continue
        found = [operation for operation in operations if column in operation.produces]
        producers[column] = [operation.name for operation in found]
        _check_producers(column, found)
        for operation in found:
            if operation.name not in chosen:
                chosen[operation.name] = operation
                open_columns += sorted(operation.consumes)
    return _ordered(chosen, producers)


def _check_producers(column: str, found: Sequence[Operation]) -> None:
    if not found:
        raise ConfigError(
            "algorithm", f"a need for the column {column!r}", "no installed role produces it; choose another"
        )
    filters = [operation.row_filter for operation in found]
    if len(found) > 1 and (len(set(filters)) < len(filters) or "" in filters):
        names = " and ".join(operation.name for operation in found)
        raise ConfigError("roles", f"{names}, which both produce {column!r}", "give them disjoint row filters")


def _ordered(chosen: dict[str, Operation], producers: dict[str, list[str]]) -> tuple[Operation, ...]:
    needs = {
        name: {producer for column in operation.consumes for producer in producers.get(column, ()) if producer != name}
        for name, operation in sorted(chosen.items())
    }
    try:
        return tuple(chosen[name] for name in TopologicalSorter(needs).static_order())
    except CycleError as error:
        path = " -> ".join(map(str, error.args[1]))
        raise ConfigError("roles", f"the cycle {path}", "operations of one step must not wait for each other") from None


def draw(operations: Sequence[Operation]) -> str:
    """The graph in words: one operation a line, with what it reads, waits for and gives."""
    lines = []
    for operation in operations:
        consumes = ", ".join(sorted(operation.consumes)) or "tasks"
        produces = ", ".join(sorted(operation.produces)) or f"weights of {operation.updates}"
        reads = "" if operation.reads == "none" else f"  [weights: {operation.reads}]"
        lines.append(f"{operation.name:<22} {consumes} -> {produces}{reads}")
    return "\n".join(lines)


def mermaid(operations: Sequence[Operation]) -> str:
    """The graph as a Mermaid flowchart: edges carry the columns."""
    lines = ["flowchart LR"]
    for consumer in operations:
        for producer in operations:
            columns = sorted(consumer.consumes & producer.produces)
            if columns and producer is not consumer:
                lines.append(
                    f"    {_id(producer)}[{producer.name}] -- {', '.join(columns)} --> {_id(consumer)}[{consumer.name}]"
                )
        if consumer.updates:
            targets = [
                reader
                for reader in operations
                if reader.reads in ("latest", "step-start")
                and reader is not consumer
                and reader.model == consumer.updates
            ]
            lines += [f"    {_id(consumer)} -. weights .-> {_id(reader)}" for reader in targets]
    return "\n".join(lines)


def _id(operation: Operation) -> str:
    return operation.name.replace(".", "_").replace("-", "_")
