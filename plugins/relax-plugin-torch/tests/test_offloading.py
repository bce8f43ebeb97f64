# SPDX-License-Identifier: Apache-2.0
"""An offloaded rank frees its memory, counts the bytes, and continues unchanged after it is loaded again."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from relax_plugin_torch.offloading import Offloader
from relax_plugin_torch.optimizer import _made
from relax_plugin_torch.sharding import local, shard, whole
from transformers import AutoConfig, AutoModelForCausalLM

from relax_core.api import ConfigError, OptimizerSpec, Version
from relax_core.trainer_kit.offload import Offload, check_offload
from tests.trainers import TRANSPORT

CPU = torch.device("cpu")


def model(device=CPU):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 8))
    return made.to(device)


def trained(module, optimizer, steps=2):
    device = next(module.parameters()).device
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 256).to(device)).square().sum().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def test_gradients_are_freed_and_counted_on_a_cpu():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    trained(module, optimizer)
    size = sum(parameter.nbytes for parameter in module.parameters())
    offloader = Offloader(module, optimizer, CPU)
    assert offloader.able == ("gradients",)
    assert offloader.offload(["gradients"]) == size
    assert all(parameter.grad is None for parameter in module.parameters())
    assert offloader.offload(["gradients"]) == 0


def test_an_offloaded_cpu_rank_returns_what_malloc_kept_of_a_step():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    small = [torch.ones(1 << 14) for _ in range(1024)]
    on_top = torch.ones(1 << 14)
    small.clear()
    before = resident()
    Offloader(model(), None, CPU).offload(["gradients"])
    assert before - resident() > 32 << 20
    assert on_top.all()


def test_gradients_with_other_references_are_not_counted_as_freed():
    module = model()
    trained(module, torch.optim.SGD(module.parameters(), lr=0.1))
    kept = module[0].weight.grad
    freed = Offloader(module, None, CPU).offload(["gradients"])
    assert freed == sum(parameter.nbytes for parameter in module.parameters()) - kept.nbytes


def test_a_cpu_keeps_weights_and_reports_the_freed_bytes():
    offloader = Offloader(model(), None, CPU)
    assert offloader.offload(["weights", "optimizer"]) == 0
    with pytest.raises(ValueError, match="weights: offloaded"):
        offloader.need("weights")
    offloader.onload(["weights", "optimizer"])
    offloader.need("weights")


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="got kv; this trainer has gradients, optimizer, weights"):
        Offloader(model(), None, CPU).offload(["kv"])


# -- the lower tier, shown from the CPU to the CPU: storages are emptied and filled again -------------------------------


def lower(module, optimizer=None, apart=False):
    return Offloader(module, optimizer, CPU, lower_tier=True, apart=apart)


def states(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]


def held(tensors):
    """Bytes of their storages, each once."""
    storages = {local(one).untyped_storage()._cdata: local(one).untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def test_offloaded_parts_hold_no_storage_and_return_with_every_bit():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    trained(module, optimizer)
    tensors = [*module.parameters(), *module.buffers(), *states(optimizer)]
    before, size = [tensor.detach().clone() for tensor in tensors], held(tensors)
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    offloader = lower(module, optimizer)
    assert offloader.able == ("gradients", "optimizer", "weights")
    assert offloader.offload(["weights", "optimizer", "gradients"]) == size + gradients
    assert held(tensors) == 0
    assert offloader.offload(["weights"]) == 0
    offloader.onload(["weights", "optimizer"])
    assert held(tensors) == size
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))


def test_parts_sleep_and_wake_apart():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    trained(module, optimizer)
    offloader = lower(module, optimizer)
    assert (
        offloader.offload(["optimizer"])
        == held(states(optimizer)) + 2 * sum(p.nbytes for p in module.parameters()) + 4 * 6
    )
    offloader.need("weights", "gradients")
    with pytest.raises(ValueError, match="optimizer: offloaded"), offloader.with_optimizer():
        raise AssertionError
    offloader.offload(["weights"])
    offloader.onload(["weights"])
    assert held(module.parameters()) and not held(states(optimizer))


def test_tied_weights_and_views_move_once():
    module = model()
    module[2].weight = torch.nn.Parameter(module[0].weight.detach()[:8, :].repeat(1, 2))
    view = module[0].weight.detach()[3:5]
    before = view.clone()
    module.register_buffer("again", module[0].weight.detach())
    offloader = lower(module)
    assert offloader.offload(["weights"]) == held([*module.parameters(), *module.buffers()]) + sum(
        parameter.nbytes for parameter in module.parameters()
    ) + sum(buffer.nbytes for name, buffer in module.named_buffers() if name != "again")
    offloader.onload(["weights"])
    assert torch.equal(view, before)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_training_after_an_offload_or_with_an_offloaded_optimizer_is_unchanged(kind):
    runs = []
    for offloads, apart in ((False, False), (True, False), (False, True), (True, True)):
        module = model()
        optimizer = _made(kind, [{"params": list(module.parameters())}], OptimizerSpec(0.01))
        offloader = lower(module, optimizer, apart)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(4, 256)).square().sum().backward()
            assert not (apart and held(states(optimizer)))
            with offloader.with_optimizer():
                optimizer.step()
            if offloads:
                offloader.offload(["weights", "optimizer", "gradients"])
                offloader.onload(["weights", "optimizer", "gradients"])
        runs.append([tensor.clone() for tensor in module.state_dict().values()])
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


def test_shares_of_fsdp_sleep_and_train_on_the_same(folder):
    """FSDP's own flat shares are views of the same storages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runs = []
        for offloads in (False, True):
            torch.manual_seed(0)
            shared = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            root = shard(shared, CPU, 1)
            optimizer = torch.optim.AdamW(shared.parameters(), lr=0.1)
            offloader = lower(shared, optimizer)
            for _ in range(3):
                root(lambda shared=shared: {"": shared(torch.arange(8)[None]).logits})[""].square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if offloads:
                    tensors = [*shared.parameters(), *shared.buffers(), *states(optimizer)]
                    size = held(tensors)
                    assert offloader.offload(["weights", "optimizer"]) == size > 0 == held(tensors)
                    offloader.onload(["weights", "optimizer"])
            runs.append([whole(parameter).detach().clone() for parameter in shared.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    finally:
        dist.destroy_process_group()


def test_buffers_of_deleted_tensors_are_freed():
    offload, tensor = Offload(CPU), torch.ones(1000)
    offload.away([tensor])
    offload.back()
    assert len(offload._host) == 1
    del tensor
    offload.away([])
    assert not offload._host


def test_a_cpu_has_nowhere_to_keep_an_optimizer():
    with pytest.raises(ConfigError, match=r"trainer\.offload_optimizer: got true on cpu.*leave it out"):
        check_offload(True, CPU)
    check_offload(False, CPU)
    check_offload(True, torch.device("cuda", 0))


@pytest.mark.parametrize("call", ["publish", "save", "snapshot", "load", "export", "begin_update"])
def test_an_offloaded_part_cannot_be_read(folder, start, tmp_path, call):
    trainer = start(folder)
    trainer.begin_step(Version("actor", 0, 0))
    trainer.offload(["weights", "optimizer"])
    arguments = {"publish": (Version("actor", 0, 0), TRANSPORT, ""), "begin_update": ({},)}
    with pytest.raises(ValueError, match="weights: offloaded; onload them first"):
        getattr(trainer, call)(*arguments.get(call, (str(tmp_path / "there"),)))


@pytest.mark.gpu
def test_on_a_gpu_all_parts_move_to_the_host_and_training_is_unchanged():
    device, runs = torch.device("cuda", 0), []
    for offloads in (False, True):
        module = model(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        trained(module, optimizer)
        offloader = Offloader(module, optimizer, device)
        if offloads:
            free = torch.cuda.mem_get_info(device)[0]
            freed = offloader.offload(["weights", "optimizer", "gradients"])
            assert freed >= 3 * sum(parameter.nbytes for parameter in module.parameters())
            assert torch.cuda.mem_get_info(device)[0] >= free + freed - (2 << 20)
            offloader.onload(["weights", "optimizer", "gradients"])
        runs.append(trained(module, optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
