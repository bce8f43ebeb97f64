# SPDX-License-Identifier: Apache-2.0
"""Likeliest tokens and log-probs of given ids, against transformers itself: one row at a time, no padding, no packing."""

import numpy as np
import pytest
import torch

from relax_core.api import LOG_PROBS, Algorithm, Column, Loss, Ragged, Term, Version, log_probs_at, top_k
from relax_core.testing.trainer import chunk, make_rows
from tests.trainers import accumulate, gradients

K, VOCAB = 5, 64
IDS = Column("ids", "int32", shape=(K,))


class Spread(Algorithm):
    """A loss of every output: what it is makes no sense, its gradient is compared."""

    zero_advantage_skips = False

    def columns(self):
        return frozenset({IDS})

    def outputs(self):
        return frozenset({LOG_PROBS, top_k(K), log_probs_at(IDS)})

    def loss(self, batch, policy):
        weights = torch.arange(1.0, K + 1, device=policy.log_probs.device)
        assert not policy.output("top_k_ids").is_floating_point()
        spread = (policy.output("top_k_log_probs").exp() * weights).sum(-1)
        at = (policy.output("log_probs_at:ids") * weights).sum(-1)
        return Loss({"all": Term(spread + at + policy.log_probs, 1.0, "tokens")})


@pytest.fixture
def spread(start, folder):
    """Start a trainer of `Spread`; `logits`: the most that exist at once."""

    def start_one(temperature=1.0, role="actor", logits=None):
        trainer = start(folder, algorithm=Spread, temperature=temperature, role=role)
        if logits:
            trainer._policy._max_logits = logits
        return trainer

    return start_one


def rows_with_ids():
    rows = make_rows(vocab_size=VOCAB)
    lengths = rows.columns["tokens"].lengths
    ids = np.random.default_rng(3).integers(0, VOCAB, (int(lengths.sum()), K)).astype(np.int32)
    return rows.with_columns({"ids": Ragged(ids, lengths)})


def plainly(folder, rows, temperature):
    """[tokens, vocab] log-probs of the token at each position given those before it, and the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows_of = []
    for tokens in rows.columns["tokens"].rows():
        logits = model(torch.tensor(tokens, dtype=torch.long)[None]).logits[0, :-1] / temperature
        rows_of.append(torch.cat([torch.zeros(1, VOCAB), torch.log_softmax(logits, -1)]))
    return torch.cat(rows_of), model


@pytest.mark.parametrize(
    ("temperature", "budget", "logits"), [(1.0, 0, None), (0.6, 40, None), (1.3, 10**6, 7 * VOCAB)]
)
def test_columns_equal_those_of_a_plain_forward(folder, spread, temperature, budget, logits):
    rows = rows_with_ids()
    everything, _ = plainly(folder, rows, temperature)
    mask = torch.from_numpy(rows.columns["loss_mask"].values == 1)
    trainer = spread(temperature, role="teacher", logits=logits)
    filled = trainer.forward(chunk(trainer, rows, budget), (f"top_k:{K}", "log_probs_at:ids", "log_probs"))
    have = {name: torch.from_numpy(column.values.copy()) for name, column in filled.columns.items()}
    assert filled.ids == rows.ids and set(have) == {"top_k_ids", "top_k_log_probs", "log_probs_at:ids", "log_probs"}
    assert have["top_k_ids"].dtype == torch.int32
    best, ids = everything.topk(K, dim=-1)
    assert torch.allclose(have["top_k_log_probs"][mask], best.detach()[mask], atol=1e-5)
    assert torch.equal(have["top_k_ids"][mask].long(), ids[mask])
    wanted = everything.gather(-1, torch.from_numpy(rows.columns["ids"].values).long())
    assert torch.allclose(have["log_probs_at:ids"][mask], wanted.detach()[mask], atol=1e-5)
    own = everything.gather(-1, torch.from_numpy(rows.columns["tokens"].values).long()[:, None])[:, 0]
    assert torch.allclose(have["log_probs"][mask], own.detach()[mask], atol=1e-5)
    assert not any(values[~mask].any() for values in have.values())


@pytest.mark.parametrize(("budget", "logits"), [(0, None), (1, None), (10**6, 5 * VOCAB)])
def test_gradients_equal_those_of_a_plain_forward(folder, spread, budget, logits):
    """However rows are packed, whether prompts are shared, and in whatever slices the logits are made."""
    rows = rows_with_ids()
    everything, model = plainly(folder, rows, 0.8)
    mask = torch.from_numpy(rows.columns["loss_mask"].values == 1)
    weights = torch.arange(1.0, K + 1)
    at = everything.gather(-1, torch.from_numpy(rows.columns["ids"].values).long())
    own = everything.gather(-1, torch.from_numpy(rows.columns["tokens"].values).long()[:, None])[:, 0]
    total = (everything.topk(K, dim=-1).values.exp() * weights).sum(-1) + (at * weights).sum(-1) + own
    (total[mask].sum() / mask.sum()).backward()
    trainer = spread(0.8, logits=logits)
    trainer.begin_step(Version("actor", 0, 0))
    accumulate(trainer, rows, budget=budget)
    have = gradients(trainer)
    for name, parameter in model.named_parameters():
        assert torch.allclose(have[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def test_a_missing_part_of_the_model_is_refused(spread):
    rows, trainer = rows_with_ids(), spread(role="teacher")
    with pytest.raises(ValueError, match=r"top_k:65: got more than the 64 tokens"):
        trainer.forward(chunk(trainer, rows), ("top_k:65",))
    rows.columns["ids"].values[:] = VOCAB
    with pytest.raises(ValueError, match=r"log_probs_at:ids: got ids from 64 to 64; the model has 0 to 63"):
        trainer.forward(chunk(trainer, rows), ("log_probs_at:ids",))
    with pytest.raises(ValueError, match=r"got ids of shape \[\d+\]"):
        trainer.forward(chunk(trainer, rows), ("log_probs_at:weight_versions",))
