# SPDX-License-Identifier: Apache-2.0
"""Records what TRL's SFT, DPO and reward trainers make of rows, for `test_supervised.py`; run by hand where TRL is.

    python tests/golden/record_trl_supervised.py     # in an environment with trl and nothing of ours

It calls their `_compute_loss` and `compute_loss` themselves on trainers without model or data: a forward gives the rows' own
log-probs or rewards.
"""

import contextlib
import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl

LENGTH = 7
SETTINGS = {
    "sft": ("sft", {}, 1e-12),
    "dpo": ("dpo", {"beta": 0.3}, 1e-12),
    "dpo robust": ("dpo", {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.1}, 1e-12),
    "dpo hinge": ("dpo", {"beta": 0.5, "loss_type": "hinge"}, 1e-12),
    "ipo": ("dpo", {"beta": 0.2, "loss_type": "ipo"}, 1e-12),
    "reward model": ("reward-model", {}, 1e-12),
    "reward model with margins": ("reward-model", {"margins": True}, 1e-12),
    "reward model, centred": ("reward-model", {"center_coef": 0.01}, 1e-12),
}


def draw(seed):
    source, rows = random.Random(seed), []
    for group in range(3):
        margin = source.random()
        for sample in range(2):
            length = source.randint(3, LENGTH)
            mask = [0] + [int(source.random() < 0.7) for _ in range(length - 2)] + [1]
            exact = [-abs(source.gauss(0, 1)) - 0.1 for _ in range(length)]
            rows.append({"sample": [group, sample], "mask": mask, "log_probs": exact, "margin": margin,
                         "ref": [x + source.gauss(0, 0.6) for x in exact], "reward": source.gauss(0, 1.5)})  # fmt: skip
    return rows


def by_side(rows):
    """As TRL lays them out: all chosen ones, then all rejected ones."""
    return [row for side in (0, 1) for row in rows if row["sample"][1] == side]


def padded(rows, name):
    return torch.tensor([row[name] + [0.0] * (LENGTH - len(row[name])) for row in rows], dtype=torch.float64)


class Accelerator:
    num_processes, device, parallelism_config = 1, "cpu", None

    def gather(self, values):
        return values

    gather_for_metrics = gather


def trainer_of(kind, **more):
    trainer = object.__new__(kind)
    vars(trainer).update({"accelerator": Accelerator(), "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
                          "_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1,
                          "get_tp_size": lambda: 1, **more,
                          "maybe_activation_offload_context": contextlib.nullcontext()})  # fmt: skip
    return trainer


def forward(log_probs, mask):
    blank = torch.zeros_like(log_probs)
    given = SimpleNamespace(
        log_probs=log_probs * mask, entropy=blank, mean_logits=blank, is_top1=mask.bool(), label_mask=mask
    )
    return lambda **_: given


def sft(rows, options):
    leaf, mask = padded(rows, "log_probs").requires_grad_(), padded(rows, "mask").long()
    args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    trainer = trainer_of(trl.SFTTrainer, args=args, compute_loss_func=None, label_smoother=None)
    inputs = {"input_ids": mask, "labels": mask, "attention_mask": mask}
    loss = trainer.compute_loss(forward(leaf[:, 1:], mask[:, 1:]), inputs, num_items_in_batch=mask[:, 1:].sum())
    return loss, leaf, rows


def dpo(rows, options):
    rows = by_side(rows)
    leaf, mask, start = padded(rows, "log_probs").requires_grad_(), padded(rows, "mask").long(), padded(rows, "ref")
    chosen, rejected = ((start * mask).sum(1)).chunk(2)
    trainer = trainer_of(
        trl.DPOTrainer, beta=options["beta"], loss_types=[options.get("loss_type", "sigmoid")], loss_weights=[1.0],
        label_smoothing=options.get("label_smoothing", 0.0), ld_alpha=None, f_divergence_type="reverse_kl",
        precompute_ref_logps=True, use_weighting=False, args=SimpleNamespace(),
    )  # fmt: skip
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask, "ref_chosen_logps": chosen,
              "ref_rejected_logps": rejected}  # fmt: skip
    return trainer._compute_loss(forward(leaf[:, 1:], mask[:, 1:]), inputs, return_outputs=False), leaf, rows


def reward_model(rows, options):
    rows = by_side(rows)
    leaf = torch.tensor([[row["reward"]] for row in rows], dtype=torch.float64, requires_grad=True)
    trainer = trainer_of(trl.RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=options.get("center_coef")))
    inputs = {"attention_mask": torch.ones(len(rows), 1)}
    if options.get("margins"):
        inputs["margin"] = torch.tensor([r["margin"] for r in rows if r["sample"][1] == 0], dtype=torch.float64)

    def score(**given):
        return SimpleNamespace(logits=leaf)

    loss = trainer.compute_loss(lambda margin=None, **given: score(**given), inputs)
    return loss, leaf, rows


def recorded(name, options, bound):
    loss, leaf, order = {"sft": sft, "dpo": dpo, "reward-model": reward_model}[name](draw(0), options)
    loss.backward()
    slopes = {tuple(row["sample"]): own for row, own in zip(order, leaf.grad.tolist())}
    cut = [slopes[tuple(r["sample"])][: 1 if name == "reward-model" else len(r["mask"])] for r in draw(0)]
    return {"algorithm": name, "options": options, "bound": bound, "loss": loss.item(), "slopes": cut}


if __name__ == "__main__":
    found = {label: recorded(*setting) for label, setting in SETTINGS.items()}
    text = json.dumps({"trl": trl.__version__, "rows": draw(0), "results": found}, indent=1)
    Path(__file__).with_name("trl_supervised.json").write_text(text + "\n")
