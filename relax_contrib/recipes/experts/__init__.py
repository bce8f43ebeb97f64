# SPDX-License-Identifier: Apache-2.0
"""Experts: a tiny mixture of experts learns to sort digits; the trainer replays the engine's choice of experts."""
