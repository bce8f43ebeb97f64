# SPDX-License-Identifier: Apache-2.0
"""Tests with ClearML run where it is installed (`tox -e sinks`); here only what needs no ClearML."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("clearml") else ["test_clearml.py"]
