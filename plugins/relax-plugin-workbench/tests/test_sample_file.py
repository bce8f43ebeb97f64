# SPDX-License-Identifier: Apache-2.0
"""The samples of a rollout without training: whole groups survive a kill at any byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from relax_plugin_workbench.sample_file import SampleFile

from relax_core.api.errors import ConfigError
from relax_core.observe.redaction import Redactor

SIZE = 2


def group(number: int) -> list[dict[str, Any]]:
    rewards = (0.5, None)
    return [
        {"group_id": number, "sample_index": at, "response": "hidden ö", "reward": rewards[at]} for at in range(SIZE)
    ]


def opened(path: Path) -> SampleFile:
    return SampleFile(path, SIZE, Redactor(["hidden"]))


def written(path: Path) -> bytes:
    file = opened(path)
    for number in (0, 2, 1):
        file.append(group(number))
    file.close()
    return path.read_bytes()


def test_a_kill_at_any_byte_loses_at_most_the_last_group(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    whole = written(path)
    assert b"hidden" not in whole
    ends = [0]
    for _ in range(3):
        ends.append(whole.index(b"\n", whole.index(b"\n", ends[-1]) + 1) + 1)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        count = sum(end <= cut for end in ends[1:])
        file = opened(path)
        assert file.groups == {*(0, 2, 1)[:count]}, cut
        assert (file.num_judged, file.num_failed, file.mean) == (count, count, 0.5 if count else None)
        for number in (0, 2, 1)[count:]:
            file.append(group(number))
        file.close()
        assert path.read_bytes() == whole


def test_damage_before_the_end_is_refused_and_the_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    whole = written(path)
    damaged = whole.replace(b'"group_id":2', b'"group_id":3', 1)
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="no whole group of 2 samples from line 3 on"):
        opened(path)
    assert path.read_bytes() == damaged


def test_only_one_process_writes_a_file(tmp_path: Path) -> None:
    file = opened(tmp_path / "samples.jsonl")
    with pytest.raises(ConfigError, match="another process writes"):
        opened(tmp_path / "samples.jsonl")
    file.close()
    opened(tmp_path / "samples.jsonl").close()
