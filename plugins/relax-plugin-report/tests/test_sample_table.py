# SPDX-License-Identifier: Apache-2.0
"""`relax samples` shows what the policy wrote at a step."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from relax_plugin_report.sample_table import chosen, sample_table
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError
from relax_core.cli.main import app

SAMPLES = (
    {"prompt": "1 + 1 =", "response": "3\n", "reward": 0.0, "num_tokens": 2},
    {"prompt": "2 + 2 =", "response": "4\x1b[2J", "reward": 1.0, "num_tokens": 3},
    {"prompt": "3 + 3 =", "response": None, "reward": None, "outcome": "reward_timeout", "num_tokens": 0},
    {"prompt": "4 + 4 =", "response": "8", "reward": 0.5, "num_tokens": 1, "purpose": "eval"},
)


def relax(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["samples", *map(str, arguments)], env={"COLUMNS": "100"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_samples_are_chosen_by_purpose_and_sorted_by_reward() -> None:
    def prompts(best: bool = False, worst: bool = False, evaluation: bool = False) -> list[str]:
        return [sample["prompt"][0] for sample in chosen(SAMPLES, best, worst, evaluation)]

    assert prompts() == ["1", "2", "3"] and prompts(evaluation=True) == ["4"]
    assert prompts(best=True) == ["2", "1", "3"] and prompts(worst=True) == ["1", "2", "3"]


def test_a_table_shows_the_outcome_of_a_sample_without_reward_and_no_control_character() -> None:
    assert sample_table(SAMPLES[:3], 60).split("\n\n") == [
        "        reward  tokens  prompt   response",
        "             0       2  1 + 1 =  3",
        "             1       3  2 + 2 =  4\\u001b[2J",
        "reward_timeout       0  3 + 3 =",
    ]


def test_the_middle_of_a_long_text_is_left_out_unless_the_whole_is_asked_for() -> None:
    long = {"prompt": "?", "response": "x" * 600 + "z" * 600, "reward": 1.0}
    cut, whole = (sample_table([long], 80, asked).replace("\n", "").replace(" ", "") for asked in (False, True))
    assert cut.count("x") == cut.count("z") == 240 and "x...z" in cut
    assert whole.count("x") == whole.count("z") == 600


def test_turns_before_the_response_name_their_roles() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    shown = sample_table([{"messages": turns, "response": "Hello", "reward": 1.0}], 80)
    assert "system: Be brief.  Hello\n" in shown and "user: Hi" in shown


def test_the_newest_trained_step_is_shown_and_another_one_if_asked(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_run(tmp_path, steps=3)
    assert relax(path).startswith(f"{path.name}: step 3, 8 of 8 samples\n")
    found = json.loads(relax(path, "--step", 2, "--worst", "--limit", 3, "--json"))
    assert (found["step"], len(found["samples"])) == (2, 3)
    rewards = [sample["reward"] for sample in found["samples"]]
    assert rewards == sorted(rewards)
    assert relax(path, "--follow", "--limit", 1).count("1 of 8 samples") == 1, "the run has ended"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--step", 9), "--step: got 9; no sample was found; the run has samples of steps 1 to 3"),
        (("--eval",), "no sample of an evaluation was found"),
        (("--best", "--worst"), "give one of them"),
        (("--follow", "--step", 1), "give one of them"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    write_run: Callable[..., Path], tmp_path: Path, arguments: tuple[object, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        relax(write_run(tmp_path, steps=3), *arguments)
