# SPDX-License-Identifier: Apache-2.0
"""The profile of an update: a Chrome trace that can be read, a table of operations, and the limit of the trace's size."""

import gzip
import json

from relax_core.testing.trainer import make_rows
from tests.trainers import train


def test_a_profile_of_an_update_has_its_operations_and_their_memory(folder, start, tmp_path):
    trainer, path = start(folder), tmp_path / "profile/step-000001-actor"
    trainer.start_profile([0])
    train(trainer, 0, make_rows(0, version=0))
    size = trainer.stop_profile(str(path), 10**9)
    trace = tmp_path / "profile/step-000001-actor-rank-0.trace.json.gz"
    assert trace.stat().st_size == size
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "[memory]"} <= names
    table = (tmp_path / "profile/step-000001-actor-rank-0.operations.txt").read_text()
    assert "aten::mm" in table and "CPU Mem" in table
    assert trainer.stop_profile(str(path), 10**9) == 0, "no profile is open"


def test_a_trace_above_the_limit_is_deleted_and_other_ranks_record_nothing(folder, start, tmp_path):
    trainer = start(folder)
    trainer.start_profile([0])
    train(trainer, 0, make_rows(0, version=0))
    assert trainer.stop_profile(str(tmp_path / "step"), 10) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["step-rank-0.operations.txt"]
    trainer.start_profile([1])
    assert trainer.stop_profile(str(tmp_path / "other"), 10) == 0
