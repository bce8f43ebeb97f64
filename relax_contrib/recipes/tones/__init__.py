# SPDX-License-Identifier: Apache-2.0
"""Tones: a tiny Qwen3-Omni thinker learns to classify a noisy tone as low, mid or high."""
