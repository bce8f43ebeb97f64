# SPDX-License-Identifier: Apache-2.0
"""The components that this distribution offers. They are named by strings only: listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_sandboxes() -> list[Component]:
    package = "relax_plugin_sandboxes"
    return [
        Component("bubblewrap", f"{package}.bubblewrap:Bubblewrap", "Namespaces of the kernel: no network, no files"),
        Component(
            "landlock",
            f"{package}.landlock:Landlock",
            "Files and signals by Landlock, no network by a filter; needs no namespaces",
        ),
        Component(
            "process", f"{package}.process:Process", "Limits alone, and no isolation: for programs that you trust"
        ),
    ]
