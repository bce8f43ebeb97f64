# SPDX-License-Identifier: Apache-2.0
"""Records what TRL's generalised JSD makes of logits, for `test_distillation.py`; run by hand, as `record_trl.py` is.

    python tests/golden/record_trl_distillation.py     # in an environment with trl; writes trl_distillation.json

`GKDTrainer.generalized_jsd_loss` itself: its beta 0 is KL(teacher || student), its beta 1 KL(student || teacher).
"""

import json
import random
from pathlib import Path

import torch
import trl
from trl.experimental.gkd import GKDTrainer

VOCAB, LENGTHS, TEMPERATURE = 5, (4, 3, 6), 0.8


def draw(seed):
    source = random.Random(seed)

    def logits(length):
        return [[source.gauss(0, 1.5) for _ in range(VOCAB)] for _ in range(length)]

    return [{"student": logits(n), "teacher": logits(n), "mask": [0] + [int(source.random() < 0.8) for _ in range(n - 2)] + [1]}
            for n in LENGTHS]  # fmt: skip


def padded(rows, name):
    blank = [0.0] * VOCAB
    return torch.tensor([row[name] + [blank] * (max(LENGTHS) - len(row[name])) for row in rows], dtype=torch.float64)


def theirs(rows, beta):
    student = padded(rows, "student").requires_grad_()
    labels = torch.tensor(
        [[0 if m else -100 for m in row["mask"]] + [-100] * (max(LENGTHS) - len(row["mask"])) for row in rows]
    )
    loss = GKDTrainer.generalized_jsd_loss(
        student, padded(rows, "teacher"), labels=labels, beta=beta, temperature=TEMPERATURE
    )
    loss.backward()
    slopes = [row[: len(own["mask"])] for row, own in zip(student.grad.tolist(), rows)]
    return {"beta": beta, "loss": loss.item(), "slopes": slopes}


if __name__ == "__main__":
    drawn = draw(0)
    results = {
        "forward": theirs(drawn, 0),
        "reverse": theirs(drawn, 1),
        "jsd": theirs(drawn, 0.5),
        "jsd 0.9": theirs(drawn, 0.9),
    }
    recorded = {"trl": trl.__version__, "temperature": TEMPERATURE, "rows": drawn, "results": results}
    Path(__file__).with_name("trl_distillation.json").write_text(json.dumps(recorded, indent=1) + "\n")
