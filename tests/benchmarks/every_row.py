# SPDX-License-Identifier: Apache-2.0
"""GRPO that computes every row, those without gradient too: what `trl.py` measures row skipping against."""

from relax_plugin_policy_gradient.grpo import GRPO


class EveryRow(GRPO):
    """The same loss; no row is left out."""

    zero_advantage_skips = False
