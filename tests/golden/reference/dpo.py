# SPDX-License-Identifier: Apache-2.0
"""DPO, arXiv 2305.18290 eq. 7, with smoothed labels; robust DPO, arXiv 2403.00409; SLiC's hinge; IPO, arXiv 2310.12036
eq. 17."""

from tests.golden.reference.plain import larger, log_sigmoid, mean, pairs, trained


def log_ratio(row, averaged):
    apart = [row["log_probs"][t] - row["ref"][t] for t in trained(row)]
    return mean(apart) if averaged else sum(apart)


def loss(rows, options):
    kind, beta, wrong = options["loss_type"], options["beta"], options["label_smoothing"]
    losses = []
    for chosen, rejected in pairs(rows):
        ahead = log_ratio(chosen, kind == "ipo") - log_ratio(rejected, kind == "ipo")
        right, turned = -log_sigmoid(beta * ahead), -log_sigmoid(-beta * ahead)
        if kind == "ipo":
            losses.append((ahead - 1 / (2 * beta)) ** 2)
        elif kind == "hinge":
            losses.append(larger(0.0, 1 - beta * ahead))
        elif kind == "robust":
            losses.append(((1 - wrong) * right - wrong * turned) / (1 - 2 * wrong))
        else:
            losses.append((1 - wrong) * right + wrong * turned)
    return mean(losses)
