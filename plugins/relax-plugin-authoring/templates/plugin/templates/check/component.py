"""The check `{{ cookiecutter.name }}`: looks at the rewards of a run's first step."""

from collections.abc import Iterator

from relax_core.api import CheckFinding, FirstStepFacts

NAME = "some samples earn a reward"


def {{ cookiecutter.class_name }}(facts: FirstStepFacts) -> Iterator[CheckFinding]:
    """Yield one finding: a warning if no sample of step 1 earned a reward. The function must be pure and quick."""
    mean = facts.metrics.get("reward/mean")
    if mean is None:
        yield CheckFinding(NAME, "not applicable", "the run has no rewards")
    elif mean > 0:
        yield CheckFinding(NAME, "ok", f"mean {mean:.3g}")
    else:
        advice = "try easier tasks, or check that the reward reads the answers: `relax try my.toml`"
        yield CheckFinding(NAME, "warning", f"mean {mean:.3g}", advice=advice)
