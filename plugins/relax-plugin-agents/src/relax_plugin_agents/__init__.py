# SPDX-License-Identifier: Apache-2.0
"""Environments whose agent is a program of its own."""
