# SPDX-License-Identifier: Apache-2.0
"""Tests with SwanLab run where it is installed (`tox -e sinks`); here only what needs no SwanLab."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("swanlab") else ["test_swanlab.py"]
