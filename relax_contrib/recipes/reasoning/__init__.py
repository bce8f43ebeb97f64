# SPDX-License-Identifier: Apache-2.0
"""Reasoning: a tiny model learns several data sets of reasoning-gym at once, judged by each set's own scorer."""
