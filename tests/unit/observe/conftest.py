# SPDX-License-Identifier: Apache-2.0
"""A fresh run directory and a clock in the test's hand."""

from datetime import datetime
from random import Random

import pytest

from relax_core.observe.run_directory import RunDirectory
from tests.clocks import HandClock


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def run_dir(tmp_path):
    run = RunDirectory.create(None, "maths", datetime(2026, 11, 20), Random(1), root=tmp_path / "runs")
    run.write_config("steps = 4\n")
    yield run
    run.close()
