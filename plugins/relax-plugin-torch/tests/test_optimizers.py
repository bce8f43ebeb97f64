# SPDX-License-Identifier: Apache-2.0
"""Optimizers of kept libraries under the same table: what they compute, hold and continue. torchao's where it is installed."""

import importlib.util
import sys

import pytest
import torch
from relax_plugin_torch.optimizer import advance, make_optimizer, state_bytes

from relax_core.api import ConfigError, OptimizerSpec, UpdateOutcome
from tests.trainers import running, train, weights

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
KINDS = ("adamw", "adafactor", "sgd", *(["adamw-8bit"] if importlib.util.find_spec("torchao") else []))
SPEC = OptimizerSpec(1e-2, betas=(0.9, 0.99))


def spec_of(kind):
    return OptimizerSpec(1e-2) if kind == "adafactor" else SPEC


@pytest.fixture
def start(start, folder):
    return lambda kind, **how: start(folder, optimizer=spec_of(kind), options={"optimizer": kind}, **how)


def wide():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))


def descended(kind, steps=60):
    """The loss of a small regression, before and after."""
    model, losses = wide(), []
    optimizer = make_optimizer(model, spec_of(kind), kind)
    torch.manual_seed(1)
    inputs, wanted = torch.randn(32, 64), torch.randn(32, 64)
    for _ in range(steps):
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        advance(optimizer, 1e-2)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1], state_bytes(optimizer), sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_each_optimizer_reduces_the_loss_and_holds_its_declared_state(kind):
    first, last, held, size = descended(kind)
    assert last < (0.97 if kind == "sgd" else 0.7) * first
    most = {"adamw": 2.0, "sgd": 1.0, "adafactor": 0.1, "adamw-8bit": 0.6}[kind]
    assert held <= most * size + 64


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_that_of_the_step(kind):
    model = wide()
    optimizer = make_optimizer(model, spec_of(kind), kind)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 64)).sum().backward()
    advance(optimizer, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    advance(optimizer, 1e-2)
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_sgd_repeats_the_first_beta_s_share_of_the_last_move():
    model = wide()
    optimizer = make_optimizer(model, OptimizerSpec(1e-2, betas=(0.75, 0.99), weight_decay=0.0), "sgd")
    weight, places = model[0].weight, []
    for slope in (1.0, 0.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, slope)
        places.append(weight.detach().clone())
        advance(optimizer, 0.5)
    torch.testing.assert_close(places[1], places[0] - 0.5)
    torch.testing.assert_close(weight.detach(), places[1] - 0.75 * 0.5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("adamw")])
def test_both_kinds_of_adamw_have_the_betas_of_the_table(kind):
    groups = make_optimizer(wide(), OptimizerSpec(1e-2, betas=(0.7, 0.8)), kind).param_groups
    assert {group["betas"] for group in groups} == {(0.7, 0.8)}


@pytest.mark.parametrize("kind", KINDS)
def test_continuing_from_a_checkpoint_is_bit_exact(start, tmp_path, kind):
    trainer = start(kind, deterministic=True)
    assert train(trainer, 0).outcome is UpdateOutcome.APPLIED
    trainer.save(str(tmp_path / "checkpoint"))
    train(trainer, 1)
    other = start(kind, deterministic=True)
    other.load(str(tmp_path / "checkpoint"))
    train(other, 1)
    own = weights(other)
    assert all(torch.equal(tensor, own[name]) for name, tensor in weights(trainer).items())


if "adamw-8bit" in KINDS:

    def test_eight_bits_come_back_as_they_were():
        """Where a tensor is large enough for blocks, moments are codes; the tiny model's never are."""
        from relax_plugin_torch.optimizer import joined, parts

        model = wide()
        optimizer = make_optimizer(model, SPEC, "adamw-8bit")
        model(torch.ones(1, 64)).square().sum().backward()
        advance(optimizer, 1e-2)
        for moment in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[model[0].weight][moment]
            plain = {name: tensor.clone() for name, tensor in parts(value).items()}
            assert plain["codes"].dtype == torch.uint8
            assert torch.equal(joined(plain, moment).dequantize(), value.dequantize())


def test_a_checkpoint_of_another_optimizer_is_refused(start, tmp_path):
    start("sgd").save(str(tmp_path / "checkpoint"))
    with pytest.raises(ConfigError, match=r"the state of sgd and this run has adamw; set trainer\.optimizer = sgd"):
        start("adamw").load(str(tmp_path / "checkpoint"))


def test_an_optimizer_whose_library_is_missing_says_what_to_install(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"trainer\.optimizer: got 'adamw-8bit'.*relax-plugin-torch\[low-bit\]"):
        start("adamw-8bit")


def test_adafactor_refuses_betas_instead_of_ignoring_them():
    with pytest.raises(ConfigError, match=r"optimizer\.betas: got \[0\.9, 0\.99\].*default \[0\.9, 0\.999\]"):
        make_optimizer(wide(), SPEC, "adafactor")


def test_state_of_whole_tensors_is_not_shared_out(folder):
    own = {"sharding": "fsdp", "optimizer": "adafactor"}
    refused = pytest.raises(ConfigError, match=r"adafactor on sharded weights.*sharding = none")
    with refused, running(folder, 2, options=own, optimizer=SPEC):
        pass
