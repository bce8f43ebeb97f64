# SPDX-License-Identifier: Apache-2.0
"""The components that this distribution offers. They are named by strings only: listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [
        Component("guess-number", "relax_contrib.guess_number:GuessNumber", "Find a hidden number from hints"),
        Component("signalling", "relax_contrib.signalling:Signalling", "Speaker and listener settle what signals mean"),
    ]
