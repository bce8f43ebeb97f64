# SPDX-License-Identifier: Apache-2.0
"""Repair: a tiny agent runs a failing test, reads the named file and fixes it, by shell commands in a sandbox."""
