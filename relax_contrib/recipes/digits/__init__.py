# SPDX-License-Identifier: Apache-2.0
"""Digits: a tiny Qwen3-Omni thinker learns to hear spoken digits, and is judged on voices that it never heard."""
