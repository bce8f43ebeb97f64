# SPDX-License-Identifier: Apache-2.0
"""A column that `data.columns` names hides a column of the file with Relax's name, in whatever order the keys are."""

import json
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from relax_core.api import ConfigError, Task, Trajectory
from relax_core.api.algorithm import Source
from relax_core.data.dataset import Dataset, DatasetSettings
from relax_core.data.task_files import Files
from relax_core.media.placeholders import media_of
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import failing_sample
from tests.chat.tool_templates import open_family
from tests.odd_inputs.test_message_rows import TEMPLATES

ROWS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text())["rows"]


def read(path, row, columns):
    path.write_text(json.dumps(row))
    source = Files()
    with suppress(ConfigError):
        source.open(str(path), columns)
    return source


def text(prompt):
    return prompt if isinstance(prompt, str) else prompt[0].text


@pytest.mark.parametrize("order", [list, reversed], ids=["forwards", "backwards"])
@pytest.mark.parametrize("entry", ROWS, ids=[row["name"] for row in ROWS])
def test_a_mapped_column_wins_in_any_order_of_keys(tmp_path, entry, order):
    row = dict(order(list(entry["row"].items())))
    columns = dict(order(list(entry["columns"].items())))
    if "refused" in entry:
        (bad, *_) = read(tmp_path / "rows.jsonl", row, columns).problems()
        assert entry["refused"] in bad.reason and bad.where.endswith("rows.jsonl:1")
        return
    source = read(tmp_path / "rows.jsonl", row, columns)
    task, missing = source[0], [bad.reason for bad in source.problems()]
    assert bool(missing) == bool(set(columns.values()) - {*row, ""}) and all(
        "no row has" in reason for reason in missing
    )
    found = {**task.metadata, "prompt": text(task.prompt), "answer": task.answer, "id": task.id,
             "environment": task.environment}  # fmt: skip
    expected = entry.get("values", {})
    assert {name: found[name] for name in expected} == expected
    assert all(task.column(name) is None and name not in task.metadata for name in entry.get("absent", ()))
    assert not {"prompt", "answer", "id", "environment"} & {*task.metadata}
    if "media" in entry:
        assert [Path(media.source).name for media in media_of(task.prompt)] == [entry["media"]]


def test_the_mapped_columns_are_trained_and_a_row_without_them_is_refused(tmp_path):
    family = open_family(tmp_path, TEMPLATES["plain"], "<|im_end|>", tool_calls="hermes")
    columns = {"chosen": "better", "rejected": "worse", "completion": "response"}
    row = {
        "prompt": "q",
        "chosen": "0",
        "completion": "0",
        "better": "1",
        "response": "3",
        "worse": "2",
        "rejected": "0",
    }
    source = read(tmp_path / "rows.jsonl", row, columns)
    for form, texts in ((Source.PAIRS, ["q1<|im_end|>", "q2<|im_end|>"]), (Source.DATASET, ["q3<|im_end|>"])):
        found = Dataset(source, family, form, DatasetSettings(max_row_tokens=99)).examples(0)
        assert [family.decode(one.tokens, skip_special=False) for one in found] == texts
    lines = [row, {"prompt": "q", "completion": "bad"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = Files()
    source.open(str(tmp_path / "rows.jsonl"), {"completion": "response"})
    with pytest.raises(ConfigError, match=r"rows.jsonl:2 without 'completion'"):
        Dataset(source, family, Source.DATASET, DatasetSettings(max_row_tokens=99))


def test_the_record_of_a_failing_sample_has_the_answer_that_was_scored():
    task = Task("t", "q", "new", {"answer": "old", "prompt": "old", "id": "old"})
    record = failing_sample({}, task, Trajectory((), "", ()), ScoredSample())
    assert record["task"] == {"id": "t", "prompt": "q", "answer": "new"}
