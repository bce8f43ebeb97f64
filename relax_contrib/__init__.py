# SPDX-License-Identifier: Apache-2.0
"""Recipes and examples, written on the public API only."""
