# SPDX-License-Identifier: Apache-2.0
"""Leases on the devices of a run: the scheduler that grants leases, its clients in roles, and turns of engine pools."""
