# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for `relax plugins check` of components that block on purpose: suites wait 10 s for them instead of 30 s."""

from relax_core.testing.suite import Suite

Suite.deadline_s = 10.0
