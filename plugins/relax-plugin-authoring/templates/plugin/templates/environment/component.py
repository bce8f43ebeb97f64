"""The environment `{{ cookiecutter.name }}`: answers the policy turn by turn. Each sample has its own instance."""

from relax_core.api import Action, Environment, Observation, Options, Step, Task


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    max_tries: int = 3
    """Number of turns after which the sample ends with reward 0."""


class {{ cookiecutter.class_name }}(Environment[{{ cookiecutter.class_name }}Options]):
    """A task that ends when the policy says the answer; the reward is 1 / number of tries."""

    needs_columns = ("answer",)  # columns of the task file; a row without them is refused before the run starts
    gives_reward = True  # a run with this environment needs no [[rewards]]

    async def reset(self, task: Task, seed: int) -> Observation | None:
        """Start the task. Return None to show only the task's prompt; use `random.Random(seed)` for random choices."""
        self.answer, self.tries = str(task.answer), 0
        return None

    async def step(self, action: Action) -> Step:
        """Answer one turn of the policy. The policy sees the answer; the answer's tokens are never trained."""
        self.tries += 1
        if self.answer in action.text:
            return Step("Right.", done=True, reward=1.0 / self.tries)
        if self.tries >= self.options.max_tries:
            return Step("Wrong.", done=True, reward=0.0)
        return Step("Wrong, try again.", done=False)
