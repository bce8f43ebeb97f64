# SPDX-License-Identifier: Apache-2.0
"""Guess the number: a tiny model learns to use hints over several turns."""
