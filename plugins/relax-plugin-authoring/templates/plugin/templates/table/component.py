"""The configuration table `[{{ cookiecutter.name }}]`: limits that the parts of this plugin read."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from relax_core.api import ConfigError, TableOptions


class {{ cookiecutter.class_name }}(TableOptions):
    """Limits of a run, such as its budget."""

    may_change: ClassVar[tuple[str, ...]] = ("most_steps",)
    of_the_run: ClassVar[bool] = True

    most_steps: int = 0
    """Most training steps that a run may ask for; 0: no limit."""

    def problems(self, config: Mapping[str, Any]) -> Iterator[ConfigError]:
        """Yield an error for each combination with other tables that cannot work."""
        if 0 < self.most_steps < config["steps"]:
            yield ConfigError("steps", config["steps"], f"{{ cookiecutter.name }}.most_steps allows {self.most_steps}")
