# SPDX-License-Identifier: Apache-2.0
"""Repair: a tiny agent runs the failing test, reads the file that it names, and fixes it, by shell commands in a sandbox."""
