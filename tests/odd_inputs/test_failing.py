# SPDX-License-Identifier: Apache-2.0
"""Samples that fail alike end a run soon, with one of them saved; samples that fail now and then never do."""

from __future__ import annotations

import json
import math
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.api import AttemptId, Message, Outcome, Task, Trajectory, Version
from relax_core.api.bus import Issue
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.config.compose import compose
from relax_core.config.run_config import RunConfig
from relax_core.media.placeholders import MediaRefused
from relax_core.registry.catalogue import Catalogue
from relax_core.rewards.host import ScoredSample
from relax_core.roles.source import RowSource
from relax_core.sampling.failures import SampleFailures
from relax_core.sampling.groups import InflightGroup
from relax_core.views.why import failures_say

TABLE = tomllib.loads((Path(__file__).parent / "failing.toml").read_text())["schedule"]
SAMPLES = 4000


@cache
def config(limit: float) -> RunConfig:
    told = {
        "model": {"path": "model"}, "data": {"train": "tasks.jsonl"}, "steps": 1, "rewards": ["exact"],
        "rollout": {"failure_limit": limit},
    }  # fmt: skip
    return compose([told], (), Catalogue.load(), on_disk=False).config


def scored_group(number: int, size: int, fails: str) -> InflightGroup:
    """Return a scored group whose samples end as the expression says."""
    task = Task(f"t{number}", (Message("user", "go"),), "x", {"api_key": "my-own-secret", "note": "kept"})
    issue = Issue(number, tuple(AttemptId(number, sample, 0) for sample in range(size)))
    group = InflightGroup(issue, task, Version("actor", 0, 0), None)  # type: ignore[arg-type]
    ends = [eval(fails, {"g": number, "s": sample}) for sample in range(size)]  # noqa: S307 of the table
    group.trajectories = tuple(Trajectory(task.prompt, "said", ()) for _ in ends)  # type: ignore[arg-type]
    group.scores = tuple(
        ScoredSample(1.0) if end is None else ScoredSample(math.nan, outcome=Outcome(end[0]), error=end[1])
        for end in ends
    )
    return group


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["what"].replace(" ", "-"))
def test_a_run_stops_at_failures_alike_and_only_then(entry: dict[str, Any], tmp_path: Path) -> None:
    failures = SampleFailures(config(entry.get("limit", 0.5)), str(tmp_path))
    size, stopped = entry.get("group_size", 8), None
    groups = [scored_group(number, size, entry["fails"]) for number in range(SAMPLES // size)]
    for seen, group in enumerate(groups, 1):
        try:
            failures.record([group], entry.get("in_play", 0))
        except RelaxError as error:
            stopped = error
            break
    if "stops" not in entry:
        assert stopped is None and not list(tmp_path.iterdir())
        return
    assert stopped is not None and seen * size < entry["stops"] + size, seen * size
    assert stopped.exit_code == entry["code"]
    assert all(part in str(stopped) for part in entry["says"]), str(stopped)
    saved = json.loads((tmp_path / "failing-sample.json").read_text())
    assert saved["outcome"] in str(stopped) and saved["response"] == "said" and saved["task"]["note"] == "kept"
    assert "my-own-secret" not in (tmp_path / "failing-sample.json").read_text()


def test_the_rate_shows_in_why_and_status_meanwhile(tmp_path: Path) -> None:
    failures = SampleFailures(config(0.5), str(tmp_path))
    assert failures.facts() == {}
    for number in range(10):
        fails = '("environment_error", "step raised TypeError") if s == 0 else None'
        failures.record([scored_group(number, 8, fails)], 0)
    (line,) = failures_say({"facts": {"failures": failures.facts()}})
    assert line == (
        "10 of the last 80 samples failed: environment_error of environment single-turn; newest: step raised TypeError"
    )


def test_tasks_whose_prompts_are_too_long_do_not_count(tmp_path: Path) -> None:
    failures = SampleFailures(config(0.5), str(tmp_path))
    for number in range(100):
        group = scored_group(number, 8, '("invalid_task", "a prompt of 900 tokens")')
        group.unfit = "a prompt of 900 tokens"
        failures.record([group], 0)
    assert failures.facts() == {}


@pytest.mark.parametrize("limit", ["0", "1.5", "nan", "-1"])
def test_the_limit_is_a_share(limit: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.failure_limit"):
        config(float(limit))


@pytest.mark.parametrize(("readable", "stops_at"), [(0, 16), (10, None)])
async def test_rows_whose_media_cannot_be_read_end_a_supervised_run(
    readable: int, stops_at: int | None, tmp_path: Path
) -> None:
    """`readable`: of ten rows; a medium that can't be read is not tried again."""

    async def emit(event: Any) -> None: ...

    async def prepare(messages: int) -> None:
        if messages % 10 >= readable:
            raise MediaRefused("image cat.png: no image")

    run: Any = SimpleNamespace(media=(1,), rollout=SimpleNamespace(failure_limit=0.5), dump=dict)
    source: Any = RowSource()
    source._context = SimpleNamespace(config=run, run_dir=tmp_path, run_status=SimpleNamespace(emit=emit))
    source._media = SimpleNamespace(prepare=prepare, fill_placeholders=None)
    source._dataset = SimpleNamespace(messages=int, where=lambda index: f"rows.jsonl:{index}", examples=lambda *_: (1,))
    source._failures = SampleFailures(run, str(tmp_path))
    for number in range(200):
        issue = Issue(number, (AttemptId(number, 0, 0),))
        try:
            assert bool(await source._examples(issue, number)) == bool(readable)
        except ConfigError as error:
            assert number + 1 == stops_at and "rows that failed alike on the first 16 rows" in str(error)
            assert "rows.jsonl:15: image cat.png" in str(error) and (tmp_path / "failing-sample.json").exists()
            return
    assert stops_at is None
