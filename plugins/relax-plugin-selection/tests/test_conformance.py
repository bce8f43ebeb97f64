# SPDX-License-Identifier: Apache-2.0
"""Every filter and sampler keeps what its kind promises."""

from __future__ import annotations

import pytest

from relax_core.testing.filter import FilterSuite
from relax_core.testing.sampler import SamplerSuite

pytestmark = pytest.mark.one_process("exercises")


class TestZeroVariance(FilterSuite):
    component = "zero-variance"


class TestRewardBand(FilterSuite):
    component = "reward-band"


class TestTruncated(FilterSuite):
    component = "truncated"


class TestCurriculum(SamplerSuite):
    component = "curriculum"
    columns = {"difficulty": (3, 1, 2)}


class TestMixture(SamplerSuite):
    component = "mixture"
    columns = {"source": ("maths", "code", "maths")}


class TestSuccessRate(SamplerSuite):
    component = "success-rate"
