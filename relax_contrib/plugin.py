# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [Component("guess-number", "relax_contrib.guess_number:GuessNumber", "Find a hidden number from hints")]
