"""The command `relax {{ cookiecutter.name }}`."""

from typing import Annotated

import typer

from relax_core.cli.terminal import AsJson, Run, print_json, say
from relax_core.runs import open_run


def {{ cookiecutter.function }}(
    run: Run = None,
    steps: Annotated[int, typer.Option(help="Number of last steps.", min=1)] = 10,
    json: AsJson = False,
) -> None:
    """{{ cookiecutter.help }}.

    A run without rewards has no mean.
    """
    view = open_run(run)
    rewards = view.metrics().column("reward/mean")[-steps:]
    mean = sum(rewards) / len(rewards) if rewards else None
    if json:
        print_json({"run": view.name, "steps": len(rewards), "mean": mean})
    else:
        say(f"{view.name}: {'no rewards' if mean is None else f'{mean:.3f}'}")
