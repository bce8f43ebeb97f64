# SPDX-License-Identifier: Apache-2.0
"""Tones: a tiny Qwen3-Omni thinker learns to hear whether a noisy tone is low, mid or high."""
