# SPDX-License-Identifier: Apache-2.0
"""Tests of the real engine run in its own interpreter (`tox -e engines`); here only what needs no vLLM."""

from importlib.util import find_spec

NEED_VLLM = [
    "test_conformance.py", "test_cpu_stand_ins.py", "test_drafts.py", "test_own_arguments.py", "test_prompt_media.py",
]  # fmt: skip
collect_ignore = [] if find_spec("vllm") else NEED_VLLM
