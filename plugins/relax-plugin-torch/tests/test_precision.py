# SPDX-License-Identifier: Apache-2.0
"""Formats of matrix products over float32 weights, and the loss scale of fp16: what overflows is computed again, lower."""

import numpy as np
import pytest
import torch
from relax_plugin_torch.layout import by_row
from relax_plugin_torch.trainer import TorchTrainer

from relax_core.api import ConfigError, UpdateOutcome, Version
from relax_core.learn import PackedBatch
from relax_core.learn.counts import count
from relax_core.testing.trainer import InMemory, TrainerSuite, chunk, make_rows, update, with_values
from relax_core.trainer_kit.setup import bfloat16_lacks, choose_format
from relax_core.trainer_kit.update import LossScale
from tests.trainers import TRANSPORT, train, weights

CPU = torch.device("cpu")


@pytest.fixture
def start(start, folder):
    """Start a trainer in a format; options are the trainer's."""

    def started(dtype="float16", head_dtype="", transport=None, publish_dtype="", **options):
        model = {"dtype": dtype, "head_dtype": head_dtype}
        return start(folder, model=model, options=options, transport=transport, publish_dtype=publish_dtype)

    return started


def test_a_format_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match=r"model\.dtype: got 'float8'.*float32, bfloat16, float16"):
        choose_format("float8", CPU)


def test_a_gpu_that_only_imitates_bfloat16_is_refused(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert bfloat16_lacks(gpu) == "Tesla T4"
    with pytest.raises(ConfigError, match="Tesla T4 does not compute in bfloat16; use float16 or float32"):
        choose_format("bfloat16", gpu)
    assert choose_format("float16", gpu) == torch.float16
    assert choose_format("bfloat16", CPU) == torch.bfloat16


def scored(trainer, rows, held=torch.bfloat16):
    """Return log-probs of the trained tokens, and those that its bfloat16 features give in float64.

    `held`: the format to which the head's weights are rounded first.
    """
    policy = trainer._policy
    head = policy.model.get_output_embeddings().weight
    head.data.mul_(8)  # logits beyond 16, where bfloat16 has steps of 0.125
    batch = PackedBatch(rows)
    trained = batch.loss_mask.nonzero().squeeze(1)
    with torch.no_grad():
        own = policy.score(batch)["log_probs"][trained].double()
        with torch.autocast("cpu", torch.bfloat16):
            features = policy._features(by_row(batch))[by_row(batch).before[trained]]
        exact = (features.double() @ head.to(held).double().T).log_softmax(-1)
    return own, exact.gather(1, batch.tokens[trained][:, None]).squeeze(1)


def test_a_float32_head_keeps_what_bfloat16_rounds_away_and_publishes_the_same_bits(start):
    """The error of bfloat16 logits is that of their steps; the weights stay rounded as engines hold them."""
    published = []
    for head, least, most in (("", 0.03, 0.5), ("float32", 0.0, 1e-5)):
        transport = InMemory()
        trainer = start("bfloat16", head_dtype=head, transport=transport, share_prefixes=False)
        manifest = trainer.publish(Version("actor", 0, 0), TRANSPORT, "")
        published.append({info.name: array.tobytes() for info, array in transport.receive(manifest)})
        own, exact = scored(trainer, make_rows())
        assert least <= float((own - exact).abs().max()) <= most, head
    assert published[0] == published[1]


def test_a_float32_head_rounds_its_weights_to_the_format_that_engines_hold(start):
    trainer = start("bfloat16", "float32", publish_dtype="float32", share_prefixes=False)
    own, exact = scored(trainer, make_rows(), torch.float32)
    assert float((own - exact).abs().max()) <= 1e-5


def test_a_float32_head_of_a_float32_trainer_changes_nothing(start):
    rows = make_rows()
    plain, asked = (TrainerSuite.step(start("float32", head_dtype=head), 0, rows) for head in ("", "float32"))
    assert plain == asked


def test_an_overflow_halves_the_scale_and_a_scale_that_held_is_doubled():
    scale = LossScale.of(torch.float16, 8.0, 2)
    assert scale.overflowed()
    assert scale.value == 4.0
    scale.applied()
    assert scale.value == 4.0
    scale.applied()
    assert (scale.value, scale.held) == (8.0, 0)


def test_the_loss_scale_never_falls_below_one():
    scale = LossScale.of(torch.float16, 2.0, 10)
    assert scale.overflowed()
    assert not scale.overflowed()
    assert scale.value == 1.0


def test_formats_other_than_float16_are_not_scaled():
    scale = LossScale.of(torch.bfloat16, 1024.0, 1)
    scale.applied()
    assert (scale.value, scale.dynamic, scale.overflowed()) == (1.0, False, False)


def test_an_overflow_keeps_the_weights_and_succeeds_at_a_lower_scale(start):
    rows = make_rows()
    large = with_values(rows, "advantages", rows.columns["advantages"].values * 1e3)
    trainer, plain = start(loss_scale=2.0**24), start("float32")
    before = weights(trainer)
    assert train(trainer, 0, large).outcome is UpdateOutcome.OVERFLOW
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    result = update(trainer, [chunk(trainer, large)], count(large), count(large))
    assert result.outcome is UpdateOutcome.APPLIED
    assert result.metrics["train/loss_scale"][0] < 2.0**24
    wanted = TrainerSuite.step(plain, 0, large)
    assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=0.02)
    assert result.metrics["train/loss"][0] == pytest.approx(wanted.metrics["train/loss"][0], rel=0.02)


def test_a_loss_that_is_not_a_number_is_not_retried(start):
    rows = make_rows()
    broken = rows.columns["advantages"].values.copy()
    broken[-1] = np.nan
    trainer = start()
    assert TrainerSuite.step(trainer, 0, with_values(rows, "advantages", broken)).outcome is UpdateOutcome.NOT_FINITE
    assert trainer._scale.value == TorchTrainer.options_model()().loss_scale


def test_small_gradients_survive_by_the_scale(start):
    """fp16 knows nothing below 6e-8; unscaled, these are gone."""
    rows = make_rows()
    tiny = with_values(rows, "advantages", rows.columns["advantages"].values * 1e-6)
    wanted = TrainerSuite.step(start("float32"), 0, tiny).grad_norm
    assert TrainerSuite.step(start(), 0, tiny).grad_norm == pytest.approx(wanted, rel=0.02)
    assert TrainerSuite.step(start(loss_scale=1.0), 0, tiny).grad_norm < 0.98 * wanted


def test_steps_too_small_for_the_format_add_up_in_the_weights(start):
    trainer = start()
    TrainerSuite.step(trainer, 0, make_rows())
    after = weights(trainer)
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    assert any(not torch.equal(tensor.half().float(), tensor) for tensor in after.values())


def test_a_checkpoint_continues_with_its_scale(start, tmp_path):
    trainer = start(loss_scale=2.0**10, loss_scale_window=3)
    for number in range(4):
        TrainerSuite.step(trainer, number, make_rows(number, version=number))
    trainer.save(str(tmp_path / "checkpoint"))
    other = start(loss_scale=2.0**4, loss_scale_window=3)
    other.load(str(tmp_path / "checkpoint"))
    assert other._scale.state() == trainer._scale.state() == {"value": 2.0**11, "held": 1}
