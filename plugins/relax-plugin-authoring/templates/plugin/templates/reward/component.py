"""The reward `{{ cookiecutter.name }}`: scores one response to a task.

A wrong answer scores 0. Raise an error only if the task itself is invalid.
"""

from relax_core.api import Options, Reward, Task, Trajectory


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    ignore_case: bool = True
    """True: ignore upper and lower case, so that `Yes` equals `yes`."""


class {{ cookiecutter.class_name }}(Reward[{{ cookiecutter.class_name }}Options]):
    """A reward of 1 if the last line of the response equals the task's answer, else 0."""

    needs_columns = ("answer",)  # columns of the task file; a row without them is refused before the run starts

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """Return the score of a sample.

        `trajectory.response` is the policy's last turn, `trajectory.messages` the whole conversation, and
        `task.column(name)` a further column of the task file.
        """
        lines = trajectory.response.strip().splitlines() or [""]
        return float(self._normal(lines[-1]) == self._normal(str(task.answer)))

    def _normal(self, text: str) -> str:
        text = text.strip()
        return text.lower() if self.options.ignore_case else text
