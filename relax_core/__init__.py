# SPDX-License-Identifier: Apache-2.0
"""Relax: a plugin-based engine for reinforcement-learning post-training. The Python API loads on first use."""
