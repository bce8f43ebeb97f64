# SPDX-License-Identifier: Apache-2.0
"""A child sees the GPUs that the plan gives it, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.api.component import Chosen
from relax_core.api.role import WorkerSpec
from relax_core.runners.local.workers import VISIBLE, LocalWorkers, visible_devices


@pytest.mark.parametrize(
    ("devices", "seen", "given"),
    [
        (("gpu:0",), None, "0"),
        (("gpu:2", "gpu:3"), None, "2,3"),
        (("gpu:1",), "4,6", "6"),
        (("gpu:0",), "GPU-5e1f, GPU-77aa", "GPU-5e1f"),
        (("cpu:0",), None, ""),
        (("cpu:0",), "4,6", ""),
    ],
)
def test_numbers_are_counted_among_what_this_process_sees(
    devices: tuple[str, ...], seen: str | None, given: str
) -> None:
    nowhere = Path("/nowhere")
    assert visible_devices(devices, {} if seen is None else {VISIBLE: seen}, nowhere) == {VISIBLE: given}


def test_a_worker_without_devices_sees_its_parents_devices() -> None:
    assert visible_devices((), {VISIBLE: "4"}) == {}


def test_a_plan_of_more_gpus_than_there_are_goes_round(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    given = [visible_devices((f"gpu:{number}",), {}, tmp_path)[VISIBLE] for number in range(4)]
    assert given == ["0", "1", "0", "1"]
    assert visible_devices(("gpu:1",), {VISIBLE: "4"}) == {VISIBLE: "4"}


async def test_a_local_worker_is_started_with_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "5,7")
    spec = WorkerSpec(
        "w", Chosen("role", "w"), devices=("gpu:1",), target="tests.unit.runners.hosted:Hosted",
        env={"PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    workers = LocalWorkers(log_dir=tmp_path)
    try:
        (worker,) = await workers.start([spec])
        assert worker.host == "127.0.0.1" and await worker.free_port(worker.host) > 0
        assert await worker.call("variable", VISIBLE, timeout_s=60.0) == "7"
    finally:
        await workers.close()
