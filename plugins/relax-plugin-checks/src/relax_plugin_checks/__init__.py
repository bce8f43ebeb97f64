# SPDX-License-Identifier: Apache-2.0
"""Checks of a run by its first step."""
