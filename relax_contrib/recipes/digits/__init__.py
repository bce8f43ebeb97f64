# SPDX-License-Identifier: Apache-2.0
"""Digits: a tiny Qwen3-Omni thinker learns to recognise spoken digits; evaluation uses new voices."""
