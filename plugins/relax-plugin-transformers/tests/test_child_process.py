# SPDX-License-Identifier: Apache-2.0
"""The engine as it runs in production: in a child process, over the wire."""

from pathlib import Path

import pytest
from relax_plugin_transformers.engine import TransformersEngine

from relax_core.api.component import Chosen
from relax_core.api.engine import EngineSpec, GenerateRequest
from relax_core.api.errors import ConfigError
from relax_core.api.role import WorkerSpec
from relax_core.api.weights import Version
from relax_core.runners.local.workers import LocalWorkers
from relax_core.tensor_files.transport import Disk
from relax_core.testing.engine_fixture import CONTEXT, DISK, PROMPT, tensors_of, tiny_qwen3

pytestmark = pytest.mark.one_process("engines")  # whose fork server loads torch once
CHOSEN = Chosen("engine", "transformers", {"deltas_every": 2, "device": "cpu"})
SPEC = WorkerSpec("engine-0", CHOSEN, preload=TransformersEngine.preload)


async def test_engine_in_a_child_generates_updates_and_refuses(tmp_path: Path) -> None:
    first, second = (tiny_qwen3(str(tmp_path / str(seed)), seed) for seed in (1, 2))
    (worker,) = await LocalWorkers().start([SPEC])
    try:
        facts = await worker.call("start", EngineSpec(model={"path": first}, max_context=CONTEXT), timeout_s=120)
        assert facts["max_context"] == CONTEXT
        manifest = Disk().send(Version("actor", 0, 1), "full", "", tensors_of(second), str(tmp_path / "weights"))
        receipt = await worker.call("update_weights", manifest, DISK, timeout_s=60)
        assert receipt.fingerprint == manifest.fingerprint
        request = GenerateRequest("a", PROMPT, 9, seed=1)
        deltas = [delta async for got in worker.stream("generate", [request], timeout_s=60) for delta in got]
        assert sum(len(delta.tokens) for delta in deltas) == 9
        assert {delta.version for delta in deltas} == {1}
        with pytest.raises(ValueError, match="vocabulary"):
            async for _ in worker.stream("generate", [GenerateRequest("b", (4711,), 9)], timeout_s=60):
                pass
        assert (await worker.call("health", timeout_s=60)).ok
    finally:
        await worker.stop()


async def test_broken_folder_crosses_the_wire_as_a_configuration_error(tmp_path: Path) -> None:
    (worker,) = await LocalWorkers().start([SPEC])
    try:
        with pytest.raises(ConfigError, match="model.path"):
            await worker.call("start", EngineSpec(model={"path": str(tmp_path)}, max_context=8), timeout_s=120)
    finally:
        await worker.stop()
