# SPDX-License-Identifier: Apache-2.0
"""The torch trainer conforms."""

from relax_core.testing.trainer import TrainerSuite


class TestTorch(TrainerSuite):
    component = "torch"
