# SPDX-License-Identifier: Apache-2.0
"""Judged: a tiny model learns to sort digits from the verdicts of a judge, a second tiny model."""
