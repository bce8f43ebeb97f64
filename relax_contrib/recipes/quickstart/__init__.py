# SPDX-License-Identifier: Apache-2.0
"""Quickstart: a tiny model learns to sort digits. No account, no download, no GPU."""
