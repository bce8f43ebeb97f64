# SPDX-License-Identifier: Apache-2.0
"""A rank that sleeps gives its memory back, counts it, and goes on as if it had not slept."""

import pytest
import torch
from relax_plugin_torch.rest import Rest

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
    rest = Rest(module, optimizer, CPU)
    assert rest.able == ("gradients",)
    assert rest.sleep(["gradients"]) == size
    assert all(parameter.grad is None for parameter in module.parameters())
    assert rest.sleep(["gradients"]) == 0


def test_gradients_that_somebody_else_holds_are_not_counted():
    module = model()
    trained(module, torch.optim.SGD(module.parameters(), lr=0.1))
    kept = module[0].weight.grad
    freed = Rest(module, None, CPU).sleep(["gradients"])
    assert freed == sum(parameter.nbytes for parameter in module.parameters()) - kept.nbytes


def test_a_cpu_keeps_weights_and_says_so_by_the_bytes():
    rest = Rest(model(), None, CPU)
    assert rest.sleep(["weights", "optimizer"]) == 0
    with pytest.raises(ValueError, match="weights: asleep"):
        rest.need("weights")
    rest.wake(["weights", "optimizer"])
    rest.need("weights")


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="got kv; this trainer has gradients, optimizer, weights"):
        Rest(model(), None, CPU).sleep(["kv"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_all_parts_move_to_the_host_and_training_goes_on_the_same():
    device, runs = torch.device("cuda", 0), []
    for sleeps in (False, True):
        module = model(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        trained(module, optimizer)
        rest = Rest(module, optimizer, device)
        if sleeps:
            free = torch.cuda.mem_get_info(device)[0]
            freed = rest.sleep(["weights", "optimizer", "gradients"])
            assert freed >= 3 * sum(parameter.nbytes for parameter in module.parameters())
            assert torch.cuda.mem_get_info(device)[0] >= free + freed - (2 << 20)
            rest.wake(["weights", "optimizer", "gradients"])
        runs.append(trained(module, optimizer))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
