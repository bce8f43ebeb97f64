# SPDX-License-Identifier: Apache-2.0
"""Tests of the real engine run in its own interpreter (`tox -e engines`); here only what needs no vLLM."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["test_conformance.py", "test_prompt_media.py", "test_cpu_stand_ins.py"]
