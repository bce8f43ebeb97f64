# SPDX-License-Identifier: Apache-2.0
"""One bench for all algorithms: random groups in the references' form, and ours run on the same numbers.

`CASES` names every algorithm with the options that change its mathematics; a new one is a line here and a reference.
"""

import importlib
import math
import random
from functools import partial

import numpy as np
import torch

from relax_core import learn
from relax_core.api import AttemptId, Outcome, Ragged, RowBatch, RowId, Sealed
from relax_core.registry import Catalogue

EVERYTHING = {"kl_coef": 0.05, "kl_estimator": "unbiased", "entropy_coef": 0.01, "sequence_mask_delta": 0.05}
K2 = {"kl_coef": 0.1, "kl_estimator": "k2"}
ICEPOP = {"correction": "mask", "correction_floor": 0.5, "correction_cap": 5.0}
PER_TRAJECTORY = {"reward_kl_coef": 0.1, "aggregation": "trajectory"}
CASES = [
    ("grpo", {}),
    ("grpo", {"normalise": "none", "correction": "none", "aggregation": "fixed", "fixed_length": 7, **EVERYTHING}),
    ("grpo", {"aggregation": "sequence", **K2}),
    ("grpo", {"aggregation": "trajectory", "clip_high": 0.28, **EVERYTHING}),
    ("grpo", {"correction": "truncate", "correction_level": "sequence", "aggregation": "token", **K2}),
    ("grpo", {"reward_kl_coef": 0.1, **ICEPOP}),
    ("grpo", {"dual_clip": 1.1, "kl_coef": 0.1, "kl_estimator": "k1"}),
    ("dr-grpo", {}),
    ("dapo", {}),
    ("dapo", {"overlong_length": 5, "overlong_buffer": 3}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gspo", {"correction": "truncate"}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.02}),
    ("gspo", {"correction": "mask", "correction_cap": 1.5, "correction_floor": 0.5}),
    ("sapo", {}),
    ("sapo", {"correction": "reject", "correction_floor": 0.5, "correction_level": "geometric", "correction_cap": 1.5}),
    ("sapo", {"correction": "behaviour", "tau_negative": 1.5}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.1}),
    ("rloo", {}),
    ("rloo", {"reward_kl_coef": 0.05}),
    ("reinforce", {}),
    ("reinforce", {"baseline": 0.5, "correction": "none"}),
    ("reinforce-plus-plus", {}),
    ("reinforce-plus-plus", {"gamma": 0.9, **PER_TRAJECTORY}),
    ("reinforce-plus-plus-baseline", {}),
    ("reinforce-plus-plus-baseline", {"kl_coef": 0.1}),
    ("gpg", {}),
    ("opo", {}),
    ("dppo", {}),
    ("dppo", {"divergence": "kl", "delta": 0.05}),
    ("dppo", {"correction": "truncate", "delta": 0.02}),
    ("ppo", {}),
    ("ppo", {"gamma": 0.9, "lam": 0.7, "normalise": False, **PER_TRAJECTORY}),
    ("m2po", {}),
    ("m2po", {"second_moment": 0.2, "kl_coef": 0.1}),
    ("remax", {}),
    ("remax", {"reward_kl_coef": 0.05, "aggregation": "trajectory"}),
    ("max-rl", {}),
    ("gigpo", {}),
    ("gigpo", {"normalise": "none", "gamma": 0.7, "step_weight": 0.5, **PER_TRAJECTORY}),
    ("gdpo", {}),
    ("gdpo", {"weights": {"form": 0.25}, "aggregation": "trajectory"}),
]
NAMES = list(dict.fromkeys(name for name, _ in CASES))
IDS = [name + "".join(f" {key}={value}" for key, value in options.items()) for name, options in CASES]
CATALOGUE = Catalogue.load()
COLUMNS = {
    "old": "old_log_probs", "rollout": "rollout_log_probs", "ref": "ref_log_probs", "advantage": "advantages",
    "values": "values", "returns": "returns", "trusted": "trusted", "teacher": "teacher_log_probs",
}  # fmt: skip


def build(name, options=None):
    """Ours."""
    target = CATALOGUE.target("algorithm", name)
    return target(target.options_model()(**(options or {})))


def reference(name):
    """Theirs."""
    return importlib.import_module(f"tests.golden.reference.{name.replace('-', '_')}")


def draw_groups(seed, groups=3, members=3):
    """One member has no verdict, one has two rows, one group has equal rewards."""
    source = random.Random(seed)
    drawn = [[_member(source, 2 if (g, s) == (0, 1) else 1) for s in range(members)] for g in range(groups)]
    drawn[1][0]["valid"] = False
    for group, greedy in zip(drawn, (0.75, 0.0, None), strict=False):
        for member in group:
            member["greedy"] = greedy
    for member in drawn[2]:
        member["reward"], member["parts"] = 1.0, {"right": 1.0, "form": 0.0}
    for place, member in enumerate(member for group in drawn for member in group):
        _take_turns(random.Random(f"turns {seed} {place}"), member)
    return drawn


def _take_turns(source, member):
    """One to four turns over all rows, two of which may begin in one state; together they earn the reward."""
    member["turns"] = []
    for row in member["rows"]:
        row["turns"] = []
        for t, trained in enumerate(row["mask"]):
            if trained and (not any(row["mask"][:t]) or source.random() < 0.4):
                state = source.choice([-(2**62), -3, 2**40])
                member["turns"].append({"state": state, "reward": source.choice([0.0, 0.0, 0.5])})
            row["turns"].append(len(member["turns"]) - 1 if trained else -1)
    member["turns"][-1]["reward"] += member["reward"] - sum(turn["reward"] for turn in member["turns"])


def _member(source, rows):
    parts = {"right": float(source.random() < 0.5), "form": source.choice([0.0, 0.5, 1.0])}
    return {"reward": sum(parts.values()), "valid": True, "parts": parts, "rows": [_row(source) for _ in range(rows)]}


def _row(source):
    length = source.randint(3, 7)
    exact = [-abs(source.gauss(0, 1)) - 0.1 for _ in range(length)]
    near = {name: [x + source.gauss(0, by) for x in exact] for name, by in
            (("old", 0.3), ("rollout", 0.5), ("ref", 0.5))}  # fmt: skip
    near = {name: [min(x, -0.01) for x in values] for name, values in near.items()}
    mask = [0] + [int(source.random() < 0.8) for _ in range(length - 2)] + [1]
    values = [math.sin(7 * x) for x in exact]
    return {"log_probs": exact, "mask": mask, "entropy": [source.random() for _ in exact], "values": values, **near}


def rows_of(groups, advantages):
    """The rows to learn from, each with its advantage: of members, or [row][token] of members."""
    rows = []
    for g, group in enumerate(groups):
        for s, member in enumerate(group):
            for r, row in enumerate(member["rows"] if member["valid"] else ()):
                own = advantages[g][s]
                tokens = own[r] if isinstance(own, list) else [own] * len(row["mask"])
                trained = sum(sum(row["mask"]) for row in member["rows"])
                rows.append(
                    {**row, "advantage": tokens, "sample": (g, s), "id": RowId(g, s, 0, r), "sample_tokens": trained}
                )
    return rows


def batch_of(rows, dtype=np.float64):
    """The same as our batch; `entropy` and `log_probs` are what a forward gives."""

    def column(name, kind):
        return Ragged.of([np.array(row[name], dtype=kind) for row in rows])

    named = {ours: column(theirs, dtype) for theirs, ours in COLUMNS.items() if theirs in rows[0]}
    tokens = Ragged.of([np.arange(len(row["mask"]), dtype=np.int32) for row in rows])
    if "sample_tokens" in rows[0]:
        named["sample_tokens"] = Ragged.of([np.array([row["sample_tokens"]], np.int32) for row in rows])
    return RowBatch(
        tuple(row["id"] for row in rows), {"tokens": tokens, "loss_mask": column("mask", np.uint8), **named}
    )


def with_prepared(algorithm, rows):
    """The rows with what ours makes of all of them at once."""
    if not algorithm.prepared():
        return rows
    made = learn.prepared_columns(algorithm, batch_of(rows))
    return [{**row, **{name: list(values) for name, values in zip(made, parts)}}
            for row, *parts in zip(rows, *(column.rows() for column in made.values()))]  # fmt: skip


def summed(loss_of, rows, outputs, parts=None, batch_of=batch_of):
    """(loss, slopes by output and row, metrics) added up over `parts` as micro-batches are.

    `outputs`: by name, a tensor for each row, which may be differentiated by. `loss_of(batch, outputs)` is ours.
    """
    denominators = learn.Denominators(learn.count(batch_of(rows)))
    total, metrics = 0.0, {}
    for part in parts or [range(len(rows))]:
        batch = learn.PackedBatch(batch_of([rows[i] for i in part]), dtype=next(iter(outputs.values()))[0].dtype)
        loss = loss_of(batch, learn.Outputs({name: torch.cat([own[i] for i in part]) for name, own in outputs.items()}))
        value = sum(learn.reduce(loss, batch, denominators).values())
        if value.requires_grad:
            value.backward()
        total += float(value.detach())
        metrics = learn.merge_metrics(metrics, {name: (float(a), float(b)) for name, (a, b) in loss.metrics.items()})
    slopes = {
        name: [(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)).double().tolist() for leaf in leaves]
        for name, leaves in outputs.items()
    }
    return total, slopes, metrics


def tensors(rows, name, dtype=torch.float64, leaves=True):
    return [torch.tensor(row[name], dtype=dtype, requires_grad=leaves) for row in rows]


def learnt(algorithm, rows, parts=None, dtype=torch.float64):
    """(loss, d loss / d log_prob by row, metrics) with the rows split into `parts` as micro-batches are."""
    rows = with_prepared(algorithm, rows)
    outputs = {name: tensors(rows, name, dtype, name == "log_probs") for name in ("log_probs", "entropy")}
    own = partial(batch_of, dtype=np.float64 if dtype == torch.float64 else np.float32)
    loss, slopes, metrics = summed(algorithm.loss, rows, outputs, parts, own)
    return loss, slopes["log_probs"], metrics


def credited(algorithm, groups, returns=False, weights=None):
    """Our advantages (or returns) in the form of the references: of members, or [row][token] of members.

    `weights`: of the run's rewards; None: every part is a reward of weight 1.
    """
    everyone = [(g, s, member) for g, group in enumerate(groups) for s, member in enumerate(group)]
    rows = [{**row, "id": RowId(g, s, 0, r)} for g, s, m in everyone for r, row in enumerate(m["rows"])]
    asked = (
        "loss_mask",
        "rollout_log_probs",
        "ref_log_probs",
        *(COLUMNS[own] for own in ("values", "teacher") if own in rows[0]),
    )
    samples = {AttemptId(g, s, 0): _sealed(g, s, m) for g, s, m in everyone}
    greedy = {AttemptId(g, len(group), 0): group[0].get("greedy") for g, group in enumerate(groups)}
    samples |= {
        a: Sealed(a, 0, Outcome.FINISHED, reward, baseline=True) for a, reward in greedy.items() if reward is not None
    }
    batch = batch_of(rows)
    if "turns" in rows[0]:
        told = [[member["turns"][t] if t >= 0 else {"state": 0, "reward": 0.0} for t in row["turns"]]
                for _, _, member in everyone for row in member["rows"]]  # fmt: skip
        batch = batch.with_columns({
            "turns": Ragged.of([np.array(row["turns"], np.int32) for row in rows]),
            "states": Ragged.of([np.array([turn["state"] for turn in row], np.int64) for row in told]),
            "step_rewards": Ragged.of([np.array([turn["reward"] for turn in row]) for row in told]),
        })  # fmt: skip
        asked += ("turns", "states", "step_rewards")
    if weights is None:
        weights = {name: 1.0 for _, _, member in everyone for name in member["parts"]}
    grouping = learn.Grouping(batch, samples, asked, weights)
    found = algorithm.advantages(grouping.groups)
    values = found.returns if returns else found.values
    if values.shape == grouping.groups.rewards.shape:
        return values.tolist()
    by_row = iter(values.split([len(row["mask"]) for row in rows]))
    return [[[next(by_row).tolist() for _ in member["rows"]] for member in group] for group in groups]


def _sealed(group, sample, member):
    outcome = Outcome.FINISHED if member["valid"] else Outcome.REWARD_TIMEOUT
    tokens = sum(sum(row["mask"]) for row in member["rows"])
    return Sealed(
        AttemptId(group, sample, 0), len(member["rows"]), outcome, member["reward"], 0, tokens, member["parts"]
    )


def of_tokens(groups, advantages):
    """[group][member][row][token], 0 where masked: what a member has is what each of its tokens has."""
    result = []
    for group, values in zip(groups, advantages):
        result.append([])
        for member, value in zip(group, values):
            rows = value if isinstance(value, list) else [[value] * len(row["mask"]) for row in member["rows"]]
            result[-1].append([[x * m for x, m in zip(x_row, row["mask"])] for x_row, row in zip(rows, member["rows"])])
    return result


def flat(nested):
    """Every number of nested lists."""
    if isinstance(nested, list):
        return [x for part in nested for x in flat(part)]
    return [nested]


def cosine(one, other):
    a, b = flat(one), flat(other)
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
