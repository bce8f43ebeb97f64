# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [
        Component("guess-number", "relax_contrib.guess_number:GuessNumber", "Find a hidden letter from hints"),
        Component(
            "signalling", "relax_contrib.signalling:Signalling", "Speaker and listener agree on the meaning of signals"
        ),
    ]
