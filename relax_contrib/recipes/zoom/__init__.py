# SPDX-License-Identifier: Apache-2.0
"""Zoom: a tiny Qwen3-VL learns to zoom in where it is asked about, and to name a colour that only the crop shows."""
