# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run goes."""

import io

from rich.console import Console

from relax_core.api.events import (
    EvalFinished,
    FirstStepChecked,
    Logged,
    RoleFailed,
    RunFinished,
    RunStarted,
    SamplesScored,
    StepFinished,
)
from relax_core.api.role import Heartbeat, Wait
from relax_core.views.display import LiveDisplay, sparkline

STEP = {
    "reward/mean": 0.5, "lag/mean": 0.4, "lag/max": 1.0, "tokens/per_s": 1234.0, "samples/per_s": 31.5, "time/step_s": 0.8
}  # fmt: skip


def console(terminal):
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, _environ={"TERM": "xterm"}
    )


def feed(display, clock, steps=3):
    display.event(RunStarted("r", "runs/maths", {}))
    for step in range(1, steps + 1):
        clock.at += 2
        display.event(SamplesScored(step, ({"reward": 1.0},)))
        display.event(StepFinished(step, {**STEP, "reward/mean": step / 10}))
    display.event(EvalFinished(steps, "hold-out", 0.625, 64, 1.0))


def test_without_a_terminal_it_is_one_plain_line_a_step(clock):
    screen = console(False)
    display = LiveDisplay("maths", 10, console=screen, clock=clock)
    feed(display, clock)
    display.event(StepFinished(4, STEP))
    display.event(RoleFailed("rollout", "engine [died]", 4, False))
    display.event(RunFinished("finished", {}))
    display.close()
    assert screen.file.getvalue().splitlines() == [
        "maths: runs/maths, ready after 0.0 s",
        "step 1/10  reward 0.100  lag 0.40 (max 1)  samples/s 31.5  tokens/s 1,234  s/step 0.80",
        "step 2/10  reward 0.200  lag 0.40 (max 1)  samples/s 31.5  tokens/s 1,234  s/step 0.80",
        "step 3/10  reward 0.300  lag 0.40 (max 1)  samples/s 31.5  tokens/s 1,234  s/step 0.80",
        "eval hold-out at step 3: 0.625 (n=64, temperature 1)",
        "step 4/10  reward 0.500  eval/hold-out 0.625  lag 0.40 (max 1)  samples/s 31.5  tokens/s 1,234  s/step 0.80",
        "rollout failed: engine [died]",
        "maths: finished after step 4",
    ]


def test_a_terminal_shows_progress_reward_and_what_each_role_waits_for(clock):
    screen = console(True)
    display = LiveDisplay("maths", 10, console=screen, clock=clock)
    feed(display, clock)
    display.heartbeats(
        [
            Heartbeat("rollout", "busy", doing="generating 24 samples"),
            Heartbeat("critic", "busy", waits=(Wait("critic", "leave", "actor", clock.at - 2, clock.at + 60),)),
            Heartbeat("actor", "waiting", waits=(Wait("actor", "8 groups", "rollout", clock.at - 3, clock.at + 60),)),
        ]
    )
    display.close()
    shown = screen.file.getvalue()
    assert "step 3/10" in shown and "eta 14.0 s" in shown
    assert "reward ▁▄█ 0.300" in shown or "reward ▁▅█ 0.300" in shown
    assert "waits for leave from actor, 2.0 s" in shown
    assert " for 8 groups from rollout, 3.0 s" in shown and "generating 24 samples" in shown
    assert "eval/hold-out 0.625" in shown and "tokens/s 1,234" in shown


def test_quiet_prints_nothing(clock):
    for terminal in (True, False):
        screen = console(terminal)
        display = LiveDisplay("maths", 10, mode="quiet", console=screen, clock=clock)
        feed(display, clock)
        display.close()
        assert screen.file.getvalue() == ""


def test_a_run_without_an_end_in_sight_is_shown(clock):
    screen = console(True)
    display = LiveDisplay("maths", None, console=screen, clock=clock)
    feed(display, clock)
    display.close()
    assert "step 3 " in screen.file.getvalue()


def test_equal_rewards_have_a_sparkline():
    assert sparkline([0.5, 0.5]) == "▁▁" and sparkline([0, 1]) == "▁█"


def test_text_of_a_run_cannot_control_the_terminal(clock):
    """Of a live picture only rich's own sequences are there, none that an event brought."""
    for terminal in (False, True):
        screen = console(terminal)
        display = LiveDisplay("maths\x1b]0;title\x07", 10, console=screen, clock=clock)
        display.event(Logged("info", "rollout", "said \x1b]8;;http://x\x07 \x9b2J"))
        display.event(RoleFailed("rollout", "broke \x1b]0;title\x07", 4, False))
        display.heartbeats([Heartbeat("actor\x1b]52;c;x\x07", "busy", "work \x1b]0;title\x07")])
        display.close()
        shown = screen.file.getvalue()
        assert "\x1b]" not in shown and "\x07" not in shown and "\x9b" not in shown
        assert r"broke \u001b]0;title\u0007" in shown


def test_the_checks_of_the_first_step_follow_its_line(clock):
    screen = console(False)
    display = LiveDisplay("maths", 10, console=screen, clock=clock)
    display.event(StepFinished(1, {**STEP}))
    passed = {"name": "rewards differ", "state": "ok", "found": "spread 0.5", "evidence": "", "advice": ""}
    failed = {"name": "the ratio is 1", "state": "failed", "found": "at most 1.4", "evidence": "", "advice": "look"}
    display.event(FirstStepChecked(1, (passed, failed, {**failed, "state": "not applicable"})))
    display.close()
    assert screen.file.getvalue().splitlines()[1:] == [
        "step 1: rewards differ (spread 0.5)", "step 1: check failed: the ratio is 1: at most 1.4; look",
    ]  # fmt: skip
