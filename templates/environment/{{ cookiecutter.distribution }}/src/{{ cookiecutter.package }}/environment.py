"""The environment `{{ cookiecutter.name }}`: answers the policy turn by turn. One instance serves one sample."""

from relax_core.api import Action, Environment, Observation, Options, Step, Task


class {{ cookiecutter.class_name }}Options(Options):
    max_tries: int = 3
    """Turns until the sample ends without reward."""


class {{ cookiecutter.class_name }}(Environment[{{ cookiecutter.class_name }}Options]):
    """The policy tries until it has said the task's answer; sooner is worth more."""

    needs_columns = ("answer",)  # of the task file; a row without one is refused before the run starts
    gives_reward = True  # so a run needs no [[rewards]]

    async def reset(self, task: Task, seed: int) -> Observation | None:
        """Start the task; draw what is random from `random.Random(seed)`. The task's prompt is all there is to see."""
        self.answer, self.tries = str(task.answer), 0
        return None

    async def step(self, action: Action) -> Step:
        """Answer one turn. What is said here is shown to the policy and never trained on."""
        self.tries += 1
        if self.answer in action.text:
            return Step("Right.", done=True, reward=1.0 / self.tries)
        if self.tries >= self.options.max_tries:
            return Step("Wrong.", done=True, reward=0.0)
        return Step("Wrong, try again.", done=False)
