# SPDX-License-Identifier: Apache-2.0
"""Where TRL has the same loss, ours equals it on the same tensors: loss and gradient as `record_trl.py` took them down.

Not compared, because TRL's is another: its RLOO clips the ratio of the sequence where the paper has REINFORCE, and its group
standard deviation adds 1e-4 where ours adds 1e-6.
"""

import json
from pathlib import Path

import pytest

from relax_core.api import RowId
from tests.golden.bench import build, flat, learnt

RECORDED = json.loads(Path(__file__).with_name("trl.json").read_text())
NONE = {"correction": "none"}
OURS = {
    "grpo": ("grpo", NONE),
    "grpo with divergence": ("grpo", {**NONE, "kl_coef": 0.04}),
    "grpo with unbiased divergence": ("grpo", {**NONE, "kl_coef": 0.04, "kl_estimator": "unbiased"}),
    "grpo with truncated weights": ("grpo", {"correction": "truncate"}),
    "grpo without far sequences": ("grpo", {**NONE, "sequence_mask_delta": 0.05}),
    "dr-grpo": ("dr-grpo", {**NONE, "aggregation": "fixed", "fixed_length": RECORDED["length"]}),
    "dapo": ("dapo", NONE),
    "gspo": ("gspo", {**NONE, "clip_low": 0.05, "clip_high": 0.05}),
    "sapo": ("sapo", NONE),
    "cispo": ("cispo", {**NONE, "clip_high": 0.5}),
}


@pytest.mark.parametrize("name", sorted(RECORDED["results"]))
def test_ours_is_theirs(name):
    algorithm, options = OURS[name]
    rows = [_row(i, row) for i, row in enumerate(RECORDED["rows"])]
    if "kl_estimator" in options:  # TRL weighs this divergence by the ratio to its old policy
        rows = [{**row, "rollout": row["old"]} for row in rows]
    loss, slopes, _ = learnt(build(algorithm, options), rows)
    theirs = RECORDED["results"][name]
    bound = 1e-6 if name == "sapo" else 1e-12  # TRL holds its temperatures in float32
    assert loss == pytest.approx(theirs["loss"], abs=bound)
    assert flat([row[1:] for row in slopes]) == pytest.approx(flat(theirs["slopes"]), abs=bound)


def _row(number, row):
    """The completion's tokens behind one given token."""
    columns = {name: [0.0, *row[name]] for name in ("log_probs", "old", "rollout", "ref")}
    tokens = len(columns["old"])
    return {"id": RowId(number, 0, 0, 0), "sample": number, "mask": [0] + [1] * (tokens - 1), "entropy": [0.0] * tokens,
            "advantage": [row["advantage"]] * tokens, **columns}  # fmt: skip
