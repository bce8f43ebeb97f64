# SPDX-License-Identifier: Apache-2.0
"""Motion: a tiny Qwen3-VL learns to name the direction of a moving square in a video."""
