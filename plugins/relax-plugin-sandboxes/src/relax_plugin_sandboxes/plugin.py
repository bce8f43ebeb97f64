# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_sandboxes() -> list[Component]:
    package = "relax_plugin_sandboxes"
    return [
        Component(
            "bubblewrap", f"{package}.bubblewrap:Bubblewrap", "Kernel namespaces: no network, no files outside the box"
        ),
        Component(
            "landlock",
            f"{package}.landlock:Landlock",
            "Landlock for files and signals, a seccomp filter against the network; needs no namespaces",
        ),
        Component("process", f"{package}.process:Process", "Limits without isolation, for programs that you trust"),
    ]
