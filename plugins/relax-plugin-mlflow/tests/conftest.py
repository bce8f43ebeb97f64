# SPDX-License-Identifier: Apache-2.0
"""Tests with MLflow run where it is installed (`tox -e sinks`); here only what needs no MLflow."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mlflow") else ["test_mlflow.py"]
