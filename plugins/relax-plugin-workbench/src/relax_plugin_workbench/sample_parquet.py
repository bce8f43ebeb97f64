# SPDX-License-Identifier: Apache-2.0
"""The samples of a `relax rollout` as one Parquet file, which task sources and data frames read.

A Parquet file cannot be continued, so `samples.jsonl` stays the record, and this file is made from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.api.errors import ConfigError
from relax_core.runs import disk_errors

if TYPE_CHECKING:
    import pyarrow as pa

FIELD = "--format"
BLOCK_ROWS, BLOCK_BYTES = 4096, 16 << 20
"""Number of samples, and bytes of their lines, after which a row group ends."""
CONVERSATIONS = ("prompt", "messages")
OBJECTS = (*CONVERSATIONS, "rewards")
"""Columns whose objects may lose null keys: in a table, an object has the keys of all rows, and readers skip nulls."""
FREE = ("info", "nodes")
"""Columns of any plain data, which become JSON text."""
TEXTS, COUNTS = (
    ("schema", "task_id", "response", "outcome", *FREE),
    ("group_id", "sample_index", "attempt", "num_tokens"),
)
"""Columns whose type does not depend on the samples; `reward` is a number with a fraction."""


def check_pyarrow() -> None:
    """Raise ConfigError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        got = "parquet, but pyarrow is not installed"
        raise ConfigError(FIELD, got, "pip install relax-core[tables], or choose --format jsonl") from error


def write_parquet(samples: Path, out: Path) -> None:
    """Write the samples of a file of JSON lines to `out`, which appears when it is complete.

    Arguments of tool calls, `info` and `nodes` become JSON text. If a message has parts, every content becomes a list of
    parts. Raises ConfigError naming a column whose values a table cannot hold unchanged.
    """
    from pyarrow import parquet

    with disk_errors(samples), samples.open("rb") as file:
        records = map(json.loads, file)
        conversations = (row[name] for row in records for name in CONVERSATIONS if isinstance(row.get(name), list))
        in_parts = any(isinstance(message["content"], list) for messages in conversations for message in messages)
    schema = _schema(samples, in_parts)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    with disk_errors(out):
        try:
            with draft.open("wb") as file:
                with parquet.ParquetWriter(file, schema) as writer:
                    for rows in _blocks(samples, in_parts):
                        writer.write_table(_table(rows, schema))
                os.fsync(file.fileno())
            draft.replace(out)
        except NotImplementedError as error:  # objects without any key
            raise _refused("a column", error) from error
        finally:
            draft.unlink(missing_ok=True)


def _schema(samples: Path, in_parts: bool) -> pa.Schema:
    """Return the schema of all samples."""
    import pyarrow as pa

    fixed = {**dict.fromkeys(TEXTS, pa.string()), **dict.fromkeys(COUNTS, pa.int64()), "reward": pa.float64()}
    schema = pa.schema([])
    for rows in _blocks(samples, in_parts):
        for name in dict.fromkeys(name for row in rows for name in row):
            try:
                found = pa.array([row.get(name) for row in rows], fixed.get(name)).type
                schema = pa.unify_schemas([schema, pa.schema([(name, found)])], promote_options="permissive")
            except (ValueError, TypeError, ArithmeticError) as error:
                raise _refused(f"the column {name!r}", error) from error
    return schema


def _table(rows: Sequence[Mapping[str, object]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table of the schema. Raises ConfigError if a value would change."""
    import pyarrow as pa

    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        try:
            columns.append(pa.array(values, field.type))
        except (ValueError, TypeError, ArithmeticError) as error:
            raise _refused(f"the column {field.name!r}", error) from error
        stored = columns[-1].to_pylist()
        if field.name in OBJECTS:
            same = _without_nulls(values) == _without_nulls(stored)
        else:
            same = values == stored and (field.name == "reward" or _kinds(values) == _kinds(stored))
        if not same:
            raise _refused(f"the column {field.name!r}", "its values are of several types, or objects of several keys")
    return pa.Table.from_arrays(columns, schema=schema)


def _blocks(samples: Path, in_parts: bool) -> Iterator[list[dict[str, object]]]:
    rows: list[dict[str, object]] = []
    size = 0
    with disk_errors(samples), samples.open("rb") as file:
        for line in file:
            row = json.loads(line)
            said = {name: _uniform(row[name], in_parts) for name in CONVERSATIONS if name in row}
            free = {name: json.dumps(row[name], ensure_ascii=False) for name in FREE if name in row}
            rows.append({**row, **said, **free})
            size += len(line)
            if len(rows) == BLOCK_ROWS or size >= BLOCK_BYTES:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


def _uniform(conversation: object, in_parts: bool) -> object:
    """Return messages with contents and arguments of one kind; return a prompt of plain text unchanged."""
    if not isinstance(conversation, list):
        return conversation
    messages = []
    for message in conversation:
        made = dict(message)
        if in_parts and isinstance(made["content"], str):
            made["content"] = [{"type": "text", "text": made["content"]}]
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [
                {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in calls
            ]
        messages.append(made)
    return messages


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _kinds(value: object) -> object:
    """Return the types of all values within plain data; 1 and 1.0 are equal, but rewards may read them differently."""
    if isinstance(value, dict):
        return {key: _kinds(inner) for key, inner in value.items()}
    return [_kinds(inner) for inner in value] if isinstance(value, list) else type(value)


def _refused(what: str, error: object) -> ConfigError:
    got = f"parquet, but a table cannot hold {what} of these samples ({error})"
    return ConfigError(FIELD, got, "give --format jsonl: the folder has all samples as JSON lines")
