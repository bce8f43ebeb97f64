# SPDX-License-Identifier: Apache-2.0
"""Facts about the rows of step 1, as plain data for the checks of that step (`observe.first_step`); pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_core.api.batch import Ragged, RowBatch
from relax_core.observe.first_step import SHOWN

COMPARED = 4
"""Number of rows whose log-probs are compared in step 1."""


def row_facts(rows: RowBatch) -> dict[str, object]:
    """Describe which tokens of the rows are trained. A turn is a sequence of sampled tokens; without sampling, of trained.

    Keys: `samples`, `trained` (tokens), `turns` with a trained token, `ends` ((token, turns that end with it, turns that
    train it) by token), `empty` (samples without a trained token), `wrongly_trained` and `untrained` (examples of tokens);
    for sampled rows also `given` (trained tokens that the policy did not sample) and `partly` (turns trained in part).
    """
    tokens, trained = rows.columns["tokens"], rows.columns["loss_mask"].values.astype(bool)
    is_sampled = "weight_versions" in rows.columns
    sampled = rows.columns["weight_versions"].values >= 0 if is_sampled else trained
    starts = tokens.offsets()
    owner = np.repeat(np.arange(len(rows)), tokens.lengths)
    samples: dict[tuple[int, int], int] = {}
    for row, count in zip(rows.ids, np.bincount(owner, trained, len(rows)), strict=True):
        samples[row.group, row.sample] = samples.get((row.group, row.sample), 0) + int(count)
    first = sampled & ~(np.roll(sampled, 1) & (np.roll(owner, 1) == owner)) if len(owner) else sampled
    turn = np.cumsum(first) - 1
    num_turns = int(first.sum())
    length = np.bincount(turn[sampled], minlength=num_turns)
    learnt = np.bincount(turn[sampled], trained[sampled], num_turns).astype(np.int64)
    last = np.flatnonzero(first) + length - 1
    seen = learnt > 0  # turns that another row trains, or that no client read, are not trained here
    ends: dict[int, list[int]] = {}
    for at in last[seen].tolist():
        of = ends.setdefault(int(tokens.values[at]), [0, 0])
        of[0] += 1
        of[1] += int(trained[at])

    def place(at: int) -> str:
        row = rows.ids[owner[at]]
        return f"token {at - starts[owner[at]]} (id {tokens.values[at]}) of group {row.group}, sample {row.sample}"

    wrong, partly = np.flatnonzero(trained & ~sampled), np.flatnonzero(seen & (learnt < length))
    untrained = np.flatnonzero(sampled & ~trained & np.isin(turn, partly))
    facts: dict[str, Any] = {
        "samples": len(samples), "trained": int(trained.sum()), "turns": int(seen.sum()),
        "ends": [(token, *of) for token, of in sorted(ends.items())],
        "empty": [f"group {group}, sample {sample}" for (group, sample), count in samples.items() if not count],
        "wrongly_trained": [f"{place(at)} is trained and was given" for at in wrong[:SHOWN]],
        "untrained": [f"{place(at)} was sampled and is not trained" for at in untrained[:SHOWN]],
    }  # fmt: skip
    if is_sampled:
        facts |= {"given": len(wrong), "partly": len(partly)}
    return facts


def compared_rows(rows: RowBatch) -> list[int]:
    """Return the indices of the shortest rows with trained tokens, at most `COMPARED`, for `log_prob_facts`."""
    mask = rows.columns["loss_mask"]
    counts = np.bincount(np.repeat(np.arange(len(rows)), mask.lengths), mask.values, len(rows))
    able = [index for index in range(len(rows)) if counts[index]]
    return sorted(sorted(able, key=lambda index: (int(mask.lengths[index]), index))[:COMPARED])


def log_prob_facts(rows: RowBatch, log_probs: Ragged) -> dict[str, object]:
    """Compare the trainer's `log_probs` [tokens] of `compared_rows` with those of engine and, if known, reference.

    Keys: `worst`, the trained tokens with the largest differences of engine and trainer: (group, sample, place in the
    row, token, engine, trainer, reference or None); the mean |difference| `engine_trainer`; with a reference also
    `trainer_reference` and `engine_reference`.
    """
    at = np.flatnonzero(rows.columns["loss_mask"].values)
    columns, tokens = rows.columns, rows.columns["tokens"]
    trainer, engine = log_probs.values[at].astype(float), columns["rollout_log_probs"].values[at].astype(float)
    reference = columns["ref_log_probs"].values[at].astype(float) if "ref_log_probs" in columns else None
    owner, starts = np.repeat(np.arange(len(rows)), tokens.lengths)[at], tokens.offsets()
    worst = []
    for place in np.argsort(-np.abs(engine - trainer), kind="stable")[:SHOWN].tolist():
        row = rows.ids[owner[place]]
        third = None if reference is None else float(reference[place])
        worst.append((
            row.group, row.sample, int(at[place] - starts[owner[place]]), int(tokens.values[at[place]]),
            float(engine[place]), float(trainer[place]), third,
        ))  # fmt: skip
    facts = {"worst": worst, "engine_trainer": float(np.abs(engine - trainer).mean())}
    if reference is not None:
        facts["trainer_reference"] = float(np.abs(trainer - reference).mean())
        facts["engine_reference"] = float(np.abs(engine - reference).mean())
    return facts
