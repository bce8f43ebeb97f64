# SPDX-License-Identifier: Apache-2.0
"""Zoom: a tiny Qwen3-VL learns to zoom into the quarter that a question names, and to name the colour in the crop."""
