# SPDX-License-Identifier: Apache-2.0
"""Tests of the real engine run in its own interpreter (`tox -e engines`); here only what needs no SGLang."""

from importlib.util import find_spec

from relax_plugin_sglang.cpu_stand_ins import install
from relax_plugin_sglang.environment_variables import on_gpu

NEED_SGLANG = [
    "test_conformance.py",
    "test_cpu_stand_ins.py",
    "test_own_arguments.py",
    "test_prompt_media.py",
    "test_routed_experts.py",
]
collect_ignore = [] if find_spec("sglang") else NEED_SGLANG

if find_spec("sglang") and not on_gpu():
    install(gpu=False)  # the reference forward of transformers meets the same torchvision
