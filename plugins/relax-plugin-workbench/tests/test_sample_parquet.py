# SPDX-License-Identifier: Apache-2.0
"""The table of a rollout: it holds all samples unchanged or refuses them, and is read as a task file."""

from __future__ import annotations

import builtins
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pyarrow import parquet
from relax_plugin_workbench import sample_parquet
from relax_plugin_workbench.sample_parquet import check_pyarrow, write_parquet

from relax_core.api.errors import ConfigError
from relax_core.data.task_files import Files

CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": None, "b": [1]}}]}
IMAGE = {"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "what?"}]}


def sample(number: int, **more: Any) -> dict[str, Any]:
    return {"schema": "relax.sample/1", "group_id": number // 2, "sample_index": number % 2, "attempt": 0,
            "task_id": f"t:{number // 2}", "prompt": "2+2?", "response": "4\n", "answer": "4", "reward": 1.0,
            "outcome": "finished", "num_tokens": 2, **more}  # fmt: skip


def stored(folder: Path, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = folder / "samples.jsonl"
    lines.write_bytes(b"".join(json.dumps(one).encode() + b"\n" for one in samples))
    write_parquet(lines, folder / "samples.parquet")
    return list(parquet.read_table(folder / "samples.parquet").to_pylist())


def opened(path: Path, **columns: str) -> Files:
    source = Files()
    source.open(str(path), columns)
    return source


def test_all_samples_are_in_the_table_with_types_that_do_not_depend_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_parquet, "BLOCK_ROWS", 2)
    failed = {"reward": None, "answer": None, "outcome": "reward_timeout", "error": "too late"}
    samples = [sample(0, **failed), sample(1, **failed), sample(2, rewards={"maths": 1.0}), sample(3), sample(4)]
    free = {"info": {"a": {}, "b": [1, "x"]}, "nodes": [{"parent": None}, {"parent": 0}]}
    rows = stored(tmp_path, [*samples[:3], {**samples[3], **free}, samples[4]])
    assert {name: json.loads(rows[3].pop(name)) for name in free} == free
    assert [{key: value for key, value in row.items() if value is not None} for row in rows] == [
        {key: value for key, value in one.items() if value is not None} for one in samples
    ]
    types = {field.name: str(field.type) for field in parquet.read_schema(tmp_path / "samples.parquet")}
    assert (types["reward"], types["answer"], types["group_id"], types["error"]) == (
        "double",
        "string",
        "int64",
        "string",
    )
    assert parquet.read_metadata(tmp_path / "samples.parquet").num_row_groups == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.jsonl", "samples.parquet"]


def test_the_table_gives_the_tasks_of_the_lines(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    said = [{"role": "system", "content": "Look."}, IMAGE, CALL, {"role": "tool", "content": "5", "name": "f"}]
    stored(tmp_path, [sample(0, prompt=said), sample(1, prompt=said[1:2], rewards={"a": 1.0})])
    from_lines, from_table = opened(tmp_path / "samples.jsonl"), opened(tmp_path)
    for index in range(2):
        first, second = from_lines[index], from_table[index]
        assert (first.answer, first.column("response")) == (second.answer, second.column("response"))
        assert [(one.role, one.text, one.name) for one in first.prompt] == [
            (one.role, one.text, one.name) for one in second.prompt
        ]
        media = [[part.media for one in task.prompt for part in one.content if not isinstance(part, str) and part.media]
                 for task in (first, second)]  # fmt: skip
        assert media[0] == media[1] != []
    assert from_table[0].prompt[2].tool_calls[0].arguments == {"a": None, "b": [1]}


KEYS = st.sampled_from(["a", "b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(VALUES, min_size=1, max_size=4))
def test_an_answer_is_stored_unchanged_or_refused(tmp_path: Path, answers: list[Any]) -> None:
    (tmp_path / "samples.parquet").unlink(missing_ok=True)
    try:
        rows = stored(tmp_path, [sample(number, answer=answer) for number, answer in enumerate(answers)])
    except ConfigError as error:
        assert error.field == "--format" and "--format jsonl" in str(error)
        assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]
    else:
        assert json.dumps([row["answer"] for row in rows], sort_keys=True) == json.dumps(answers, sort_keys=True)


@pytest.mark.parametrize(
    "answers",
    [("4", 4), ({"a": 1}, {"b": 1}), (2**63,), (True, 1), ("4", ["4"]), ({},), ("\ud800",), (1, 0.5)],
)
def test_answers_that_a_table_would_change_are_refused_with_the_fix(tmp_path: Path, answers: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--format: got parquet, .*; give --format jsonl"):
        stored(tmp_path, [sample(number, answer=answer) for number, answer in enumerate(answers)])


def test_prompts_of_two_kinds_are_refused_by_the_name_of_the_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the column 'prompt'"):
        stored(tmp_path, [sample(0), sample(1, prompt=[{"role": "user", "content": "2+2?"}])])


def test_a_missing_pyarrow_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    check_pyarrow()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pyarrow is not installed; pip install relax-core\[tables\]"):
        check_pyarrow()
