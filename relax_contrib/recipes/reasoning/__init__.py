# SPDX-License-Identifier: Apache-2.0
"""Reasoning: a tiny model learns several sets of reasoning-gym at once, judged by the rule of each set."""
