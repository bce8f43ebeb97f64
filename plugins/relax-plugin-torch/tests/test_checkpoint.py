# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are torch's distributed ones, written beside the work; they are whole, or nobody takes them for one."""

import asyncio
import errno
import resource
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

from relax_core.api import ConfigError
from relax_core.api.errors import DiskFull
from relax_core.trainer_kit import checkpoint
from tests.trainers import running, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once


def exported(trainer, path):
    trainer.export(str(path))
    return {name: value.tobytes() for name, value in load_file(path / "model.safetensors").items()}


def test_torch_reads_it_without_us(folder, start, tmp_path):
    trainer = start(folder)
    train(trainer, 0)
    trainer.save(str(tmp_path / "checkpoint"))
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "checkpoint"))
    known = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in known.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    mine = trainer._model.state_dict()
    assert all(
        torch.equal(value, mine[name.removeprefix("model.")].cpu())
        for name, value in state.items()
        if name[:6] == "model."
    )
    assert sum(name.startswith("optimizer.") for name in state) == 3 * len(list(trainer._model.parameters()))


async def test_training_continues_while_a_snapshot_is_written(folder, start, tmp_path, monkeypatch):
    free, write = threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *given: (free.wait(60), write(*given)))
    trainer = start(folder)
    train(trainer, 0)
    trainer.snapshot(str(tmp_path / "checkpoint"))
    before = exported(trainer, tmp_path / "before")
    want = train(trainer, 1).grad_norm, exported(trainer, tmp_path / "want")
    assert want[1] != before
    waiting = asyncio.create_task(trainer.saved())
    await asyncio.sleep(0)
    assert not waiting.done()
    free.set()
    await waiting
    other = start(folder, seed=7)
    other.load(str(tmp_path / "checkpoint"))
    assert exported(other, tmp_path / "have") == before
    assert (train(other, 1).grad_norm, exported(other, tmp_path / "after")) == want


async def test_a_full_disk_is_reported_and_keeps_the_old_files(folder, start, tmp_path, monkeypatch):
    trainer = start(folder)
    trainer.save(str(tmp_path / "checkpoint"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    told = r"checkpoint: no space left to write \(No space left on device, [0-9.]+ MB free\); free some, then"
    with pytest.raises(DiskFull, match=told):
        trainer.save(str(tmp_path / "checkpoint"))
    trainer.snapshot(str(tmp_path / "other"))
    with pytest.raises(DiskFull, match="other: no space left to write"):
        await trainer.saved()
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "other"]
    trainer.load(str(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match="can't be read"):
        trainer.load(str(tmp_path / "other"))


def test_a_full_disk_of_one_rank_is_reported_to_all_ranks_and_training_continues(folder, tmp_path):
    with running(folder, 2) as trainer:
        trainer.save(str(tmp_path / "checkpoint"))
        second = trainer._ranks.processes[1].pid
        before = resource.prlimit(second, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        with pytest.raises(DiskFull, match=r"checkpoint: no space left to write \(File too large, [0-9.]+ MB free\)"):
            trainer.save(str(tmp_path / "checkpoint"))
        resource.prlimit(second, resource.RLIMIT_FSIZE, before)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
        trainer.load(str(tmp_path / "checkpoint"))
        trainer.save(str(tmp_path / "checkpoint"))


def test_an_incomplete_checkpoint_is_refused(folder, start, tmp_path):
    trainer = start(folder)
    trainer.save(str(tmp_path / "checkpoint"))
    (file,) = (tmp_path / "checkpoint").glob("shard-*")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="can't be read"):
        trainer.load(str(tmp_path / "checkpoint"))
    file.unlink()
    with pytest.raises(ConfigError, match="lacks shard-00001"):
        trainer.load(str(tmp_path / "checkpoint"))


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_deterministic_ranks_give_the_same_bits_killed_or_not(folder, tmp_path, sharding):
    """Twice from the start, and once more from a checkpoint by ranks that know nothing of it."""
    ends = []
    for run in ("one", "two", "restarted"):
        with running(folder, 2, options={"sharding": sharding}, deterministic=True) as trainer:
            if run == "restarted":
                trainer.load(str(tmp_path / "one" / "checkpoint"))
            else:
                train(trainer, 0)
                trainer.save(str(tmp_path / run / "checkpoint"))
            train(trainer, 1)
            ends.append(exported(trainer, tmp_path / run / "export"))
    assert ends[0] == ends[1] == ends[2]
