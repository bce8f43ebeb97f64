# SPDX-License-Identifier: Apache-2.0
"""The whole chain learns: rewards to groups, groups to advantages, advantages to the trainer's update."""

import numpy as np
from relax_plugin_policy_gradient.grpo import GRPO

from relax_core import learn
from relax_core.api import AttemptId, OptimizerSpec, Outcome, Ragged, RowBatch, RowId, Sealed
from relax_core.testing.trainer import VOCAB, forward, tiny_model
from tests.trainers import running, train

GROUPS, SIZE = 8, 8


def answer_distribution(trainer, prompts):
    """[prompts, vocab]: the policy's next token, from its own scores of every token."""
    rows = [(*prompt, token) for prompt in prompts for token in range(VOCAB)]
    lengths = np.full(len(rows), 3)
    batch = RowBatch(
        tuple(RowId(i // VOCAB, i % VOCAB, 0, 0) for i in range(len(rows))),
        {
            "tokens": Ragged(np.array(rows, np.int32).reshape(-1), lengths),
            "loss_mask": Ragged(np.tile([0, 0, 1], len(rows)).astype(np.uint8), lengths),
        },
    )
    return np.exp(forward(trainer, batch, 0).values[2::3].reshape(len(prompts), VOCAB))


def sampled_step(random, trainer, step):
    """Prompts (a, b) are answered by sampling; the answer a is right."""
    prompts = random.integers(0, 8, (GROUPS, 2))
    distribution = answer_distribution(trainer, prompts).astype(np.float64)
    answers = [random.choice(VOCAB, SIZE, p=p / p.sum()) for p in distribution]
    ids = [RowId(step * GROUPS + g, s, 0, 0) for g in range(GROUPS) for s in range(SIZE)]
    rewards = [float(answers[g][s] == prompts[g][0]) for g in range(GROUPS) for s in range(SIZE)]
    tokens = np.array([(*prompts[g], answers[g][s]) for g in range(GROUPS) for s in range(SIZE)], np.int32)
    chosen = np.array([distribution[g][answers[g][s]] for g in range(GROUPS) for s in range(SIZE)])
    log_probs = np.stack([np.zeros(len(ids)), np.zeros(len(ids)), np.log(chosen)], axis=1)
    lengths = np.full(len(ids), 3)
    mask = np.tile([0, 0, 1], len(ids)).astype(np.uint8)
    rows = RowBatch(tuple(ids), {
        "tokens": Ragged(tokens.reshape(-1), lengths), "loss_mask": Ragged(mask, lengths),
        "rollout_log_probs": Ragged(log_probs.reshape(-1).astype(np.float32), lengths),
        "weight_versions": Ragged(np.where(mask == 1, step, -1).astype(np.int32), lengths),
    })  # fmt: skip
    samples = {
        row.attempt_id: Sealed(AttemptId(*row[:3]), 1, Outcome.FINISHED, reward, trained_tokens=1)
        for row, reward in zip(ids, rewards, strict=True)
    }
    return rows, samples, float(np.mean(rewards))


def test_a_policy_finds_the_rewarded_answer(tmp_path):
    random, algorithm, rewards = np.random.default_rng(0), GRPO(), []
    optimizer = OptimizerSpec(1e-2, warmup_steps=3, betas=(0.9, 0.99))
    with running(tiny_model(tmp_path), algorithm=lambda: algorithm, optimizer=optimizer) as trainer:
        for step in range(150):
            rows, samples, reward = sampled_step(random, trainer, step)
            rewards.append(reward)
            grouping = learn.Grouping(rows, samples)
            train(trainer, step, rows.with_columns(grouping.columns(algorithm.advantages(grouping.groups))))
    assert np.mean(rewards[:10]) < 0.2, rewards
    assert np.mean(rewards[-30:]) > 0.5, rewards
