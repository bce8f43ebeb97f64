# SPDX-License-Identifier: Apache-2.0
"""The models of the Megatron trainer's tests, made once for all files."""

import pytest

from relax_core.testing.moe import tiny_moe
from relax_core.testing.trainer import tiny_model


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("dense"), key_value_heads=2)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    return tiny_moe(str(tmp_path_factory.mktemp("mixture")), 0, pad_token_id=None)
