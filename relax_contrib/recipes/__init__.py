# SPDX-License-Identifier: Apache-2.0
"""Recipes: a `recipe.toml` and a `build` module that makes model and data locally from a seed."""
