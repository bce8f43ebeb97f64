# SPDX-License-Identifier: Apache-2.0
"""Records what TRL's GRPO loss makes of rows, for `test_trl.py`; TRL is no dependency, so it is run by hand where one is.

    python tests/golden/record_trl.py        # in an environment with trl and nothing of ours; writes trl.json

It calls `GRPOTrainer._compute_loss` itself on a trainer without model or data, whose log-probs are the rows' own.
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl

BASE = {"loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "off_policy_mask_threshold": None, "use_vllm": False}  # fmt: skip
ARGS = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1}  # fmt: skip
SETTINGS = {
    "grpo": {},
    "grpo with divergence": {"beta": 0.04},
    "grpo with unbiased divergence": {"beta": 0.04, "use_bias_correction_kl": True},
    "grpo with truncated weights": {"use_vllm": True},
    "grpo without far sequences": {"off_policy_mask_threshold": 0.05},
    "dr-grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    "sapo": {"loss_type": "sapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
}
LENGTH = 7
CAP = 2.0


def draw(seed):
    source = random.Random(seed)
    rows = []
    for advantage in (1.1, -0.4, -0.7, 0.9, -0.9, 0.3):
        length = source.randint(2, LENGTH)
        log_probs = [-abs(source.gauss(0, 1)) - 0.1 for _ in range(length)]
        near = {name: [x + source.gauss(0, by) for x in log_probs] for name, by in
                (("old", 0.3), ("rollout", 0.5), ("ref", 0.5))}  # fmt: skip
        rows.append({"advantage": advantage, "log_probs": log_probs, **near})
    return rows


def padded(rows, name):
    return torch.tensor([row[name] + [0.0] * (LENGTH - len(row[name])) for row in rows], dtype=torch.float64)


def theirs(rows, setting):
    """(loss, slope by row)."""
    trainer = object.__new__(trl.GRPOTrainer)
    chosen = {key: value for key, value in setting.items() if key in BASE}
    vars(trainer).update({
        **BASE, **chosen, "args": SimpleNamespace(**{**ARGS, **{k: v for k, v in setting.items() if k in ARGS}}),
        "model": SimpleNamespace(training=True), "_metrics": defaultdict(lambda: defaultdict(list)), "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0, "vllm_importance_sampling_correction": True, "_entropy_bonus_enabled": False,
        "max_completion_length": LENGTH, "current_gradient_accumulation_steps": 1,
        "accelerator": SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
    })  # fmt: skip
    leaf = padded(rows, "log_probs").requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None)
    mask = torch.tensor([[1] * len(r["old"]) + [0] * (LENGTH - len(r["old"])) for r in rows])
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        "old_per_token_logps": padded(rows, "old"), "ref_per_token_logps": padded(rows, "ref"),
        "sampling_per_token_logps": padded(rows, "rollout"), "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (padded(rows, "old") - padded(rows, "rollout")).exp().clamp(max=CAP),
    }  # fmt: skip
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), [slopes[: len(row["old"])] for slopes, row in zip(leaf.grad.tolist(), rows)]


if __name__ == "__main__":
    drawn = draw(0)
    recorded = {"trl": trl.__version__, "rows": drawn, "length": LENGTH, "results": {}}
    for name, setting in SETTINGS.items():
        loss, slopes = theirs(drawn, setting)
        recorded["results"][name] = {"setting": setting, "loss": loss, "slopes": slopes}
    Path(__file__).with_name("trl.json").write_text(json.dumps(recorded, indent=1) + "\n")
