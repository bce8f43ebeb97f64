# SPDX-License-Identifier: Apache-2.0
"""Colours: a tiny Qwen3-VL learns to name the colour of a disc in a noisy picture."""
