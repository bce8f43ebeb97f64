# SPDX-License-Identifier: Apache-2.0
"""Leases on the devices of a run: the scheduler that grants them, and a role's client."""
