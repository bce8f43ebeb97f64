"""The reward `{{ cookiecutter.name }}`: judges one attempt at a task. A wrong answer is 0; raise only where the task is unusable."""

from relax_core.api import Options, Reward, Task, Trajectory


class {{ cookiecutter.class_name }}Options(Options):
    ignore_case: bool = True
    """Whether `Yes` equals `yes`."""


class {{ cookiecutter.class_name }}(Reward[{{ cookiecutter.class_name }}Options]):
    """1 where the last line of the response equals the task's answer, else 0."""

    needs_columns = ("answer",)  # of the task file; a row without one is refused before the run starts

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """The policy's last turn is `response`, the whole conversation `messages`; other columns are `task.column(name)`."""
        lines = trajectory.response.strip().splitlines() or [""]
        return float(self._normal(lines[-1]) == self._normal(str(task.answer)))

    def _normal(self, text: str) -> str:
        text = text.strip()
        return text.lower() if self.options.ignore_case else text
