# SPDX-License-Identifier: Apache-2.0
"""Importing this module applies the patches as soon as the process imports a rank of the Megatron trainer, and not before."""

from __future__ import annotations

import sys

RANK = "relax_plugin_megatron.rank"


class Patches:
    """An import hook that finds nothing and patches once."""

    def find_spec(self, name: str, *_: object) -> None:
        if name != RANK:
            return
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        from tests.megatron_on_cpu import apply

        apply()


sys.meta_path.insert(0, Patches())  # type: ignore[arg-type]
