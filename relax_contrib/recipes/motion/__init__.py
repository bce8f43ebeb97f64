# SPDX-License-Identifier: Apache-2.0
"""Motion: a tiny Qwen3-VL learns to see in a video which way a square moves."""
