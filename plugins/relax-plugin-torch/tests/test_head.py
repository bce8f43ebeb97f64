# SPDX-License-Identifier: Apache-2.0
"""The scalar head against transformers itself: values before tokens, rewards of whole rows, gradients, folders, ranks."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from relax_core import learn
from relax_core.api import Algorithm, ConfigError, Loss, Ragged, RowBatch, RowId, Term, Version
from relax_core.api.algorithm import Output
from relax_core.testing.trainer import chunk, make_rows
from tests.trainers import accumulate, gradients, train

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once


class Valued(Algorithm):
    """Squared error of the values, as a critic's."""

    fits = ("critic",)

    def __init__(self, options=None):
        super().__init__(self.options_model()())

    def loss(self, batch, policy):
        raise AssertionError("a critic is trained by fit_loss")

    def fit_loss(self, fit, batch, outputs):
        error = outputs.output("values") - batch.column("advantages")
        return Loss({"value": Term(error.square())}, {"critic/error": (error.detach().sum(), batch.loss_mask.sum())})


class Judged(Valued):
    """Bradley-Terry over neighbouring rows, as a reward model's."""

    fits = ()

    def outputs(self):
        return frozenset({Output("rewards")})

    def loss(self, batch, policy):
        rewards = policy.output("rewards")
        signs = torch.tensor([1.0, -1.0], device=rewards.device).repeat(len(rewards))[: len(rewards)]
        return Loss({"margin": Term(-torch.nn.functional.logsigmoid(rewards * signs), 1.0, "rows", per="row")})


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """A folder that has a head: the model's body under one that is not zero."""
    from transformers import AutoModelForSequenceClassification

    path = tmp_path_factory.mktemp("judge")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(path)
    return path


@pytest.fixture
def start(start):
    """Start critics, or what an algorithm and a role say."""
    return lambda path, algorithm=Valued, role="critic", **how: start(path, algorithm=algorithm, role=role, **how)


def filled(trainer, rows, column="values", budget=0):
    return trainer.forward(chunk(trainer, rows, budget), (column,)).columns[column]


def one_by_one(path, rows):
    """(values, rewards) of single rows by transformers alone, differentiable, and the model."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    hidden = [model.model(torch.tensor(row, dtype=torch.long)[None]).last_hidden_state[0] for row in rows]
    scalars = [model.score(states)[:, 0] for states in hidden]
    values = [torch.cat([torch.zeros(1), scalar[:-1]]) for scalar in scalars]
    return values, torch.stack([scalar[-1] for scalar in scalars]), model


def columns(rows, name):
    return [torch.tensor(np.array(values)) for values in rows.columns[name].rows()]


def test_values_are_of_the_tokens_before_each_trained_token(start, judge):
    rows = make_rows()
    want, _, _ = one_by_one(judge, list(rows.columns["tokens"].rows()))
    masked = torch.cat([value * mask for value, mask in zip(want, columns(rows, "loss_mask"), strict=True)])
    assert np.allclose(filled(start(judge), rows, budget=20).values, masked.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("algorithm", [Valued, Judged])
def test_gradients_equal_those_of_single_rows(start, judge, algorithm):
    rows = make_rows()
    trainer = start(judge, algorithm, "critic" if algorithm is Valued else "actor")
    trainer.begin_step(Version("critic", 0, 0))
    accumulate(trainer, rows, budget=30)
    values, rewards, model = one_by_one(judge, list(rows.columns["tokens"].rows()))
    if algorithm is Valued:
        parts = zip(values, columns(rows, "advantages"), columns(rows, "loss_mask"), strict=True)
        loss = torch.stack([((v - a).square() * m).sum() for v, a, m in parts]).sum() / learn.count(rows)["tokens"]
    else:
        plan = chunk(trainer, rows, 30).plan.micro_batches[0]
        signs = torch.zeros(len(rows))
        for planned in plan:
            signs[list(planned)] = torch.tensor([1.0, -1.0]).repeat(len(planned))[: len(planned)]
        loss = -torch.nn.functional.logsigmoid(rewards * signs).mean()
    loss.backward()
    have = gradients(trainer)
    for name, parameter in model.named_parameters():
        assert torch.allclose(have[name], parameter.grad, rtol=1e-3, atol=1e-6), name


def test_a_head_that_a_folder_lacks_is_zero_and_learns(start, folder):
    trainer, rows = start(folder), make_rows()
    assert not filled(trainer, rows).values.any()
    losses = [train(trainer, step, rows).metrics["critic/loss"][0] for step in range(12)]
    assert losses[-1] < 0.8 * losses[0] and filled(trainer, rows).values.any()


def test_a_critic_is_saved_loaded_and_exported_with_its_head(start, folder, tmp_path):
    trainer, rows = start(folder), make_rows()
    train(trainer, 0, rows)
    trainer.save(str(tmp_path / "saved"))
    trainer.export(str(tmp_path / "exported"))
    other = start(folder)
    other.load(str(tmp_path / "saved"))
    want = filled(trainer, rows).values
    assert np.array_equal(filled(other, rows).values, want)
    train(trainer, 1, rows), train(other, 1, rows)
    assert np.array_equal(filled(other, rows).values, filled(trainer, rows).values)
    assert np.allclose(filled(start(tmp_path / "exported"), rows).values, want, atol=1e-6)


def test_two_ranks_of_a_critic_are_one(start, folder, tmp_path):
    rows, one, two = make_rows(), start(folder), start(folder, ranks=2, options={"sharding": "fsdp"})
    for step in range(2):
        train(one, step, rows, budget=30), train(two, step, rows, budget=30)
    assert np.allclose(filled(two, rows).values, filled(one, rows).values, atol=1e-5) and filled(one, rows).values.any()
    two.save(str(tmp_path / "saved"))
    again = start(folder)
    again.load(str(tmp_path / "saved"))
    assert np.allclose(filled(again, rows).values, filled(one, rows).values, atol=1e-5)


def test_a_rank_that_only_fits_takes_rows_without_the_policys_columns(start, folder):
    tokens, mask = np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.uint8)
    targets = np.array([0, 1, 2], np.float32)
    columns = {"tokens": Ragged.of([tokens]), "loss_mask": Ragged.of([mask]), "advantages": Ragged.of([targets])}
    metrics = train(start(folder), 0, RowBatch((RowId(0, 0, 0, 0),), columns)).metrics
    assert metrics["critic/error"] == (pytest.approx(-3.0), 2.0) and "train/loss" not in metrics


def test_weights_without_a_layer_are_refused_by_name(start, folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    weights = load_file(f"{folder}/model.safetensors")
    lost = next(name for name in weights if "layers.0" in name)
    save_file({name: value for name, value in weights.items() if name != lost}, broken / "model.safetensors")
    shutil.copyfile(f"{folder}/config.json", broken / "config.json")
    with pytest.raises(ConfigError, match="lack"):
        start(broken)


def test_a_policy_without_a_loss_for_a_critic_is_refused(start, folder):
    with pytest.raises(ConfigError, match="no loss for a critic"):
        start(folder, Judged, "critic")
