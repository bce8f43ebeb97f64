# SPDX-License-Identifier: Apache-2.0
"""Tiny models, and trainers that end with their test."""

from contextlib import ExitStack

import pytest

from relax_core.testing.trainer import tiny_model
from tests.trainers import running


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def divisible(tmp_path_factory):
    """A model with key-value heads for two tensor-parallel ranks."""
    return tiny_model(tmp_path_factory.mktemp("model"), key_value_heads=2)


@pytest.fixture
def start():
    """Start trainers as `tests.trainers.running` does; all stop after the test."""
    with ExitStack() as started:
        yield lambda *path, **how: started.enter_context(running(*path, **how))
