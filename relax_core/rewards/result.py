# SPDX-License-Identifier: Apache-2.0
"""The result of one reward for one sample: a finite score, or how it failed and where in the author's code.

Results and trajectories travel as plain lists: they are packed in C, where dataclasses take several calls of Python an
object, and a step sends hundreds of samples.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.api.errors import DeadlineExceeded, InfrastructureError
from relax_core.api.reward import Score
from relax_core.api.task import Message
from relax_core.api.trajectory import Node, Outcome, Trajectory


class RewardResult(NamedTuple):
    """A score, or a failure with its place."""

    value: float = math.nan
    parts: Mapping[str, float] = {}
    steps: tuple[float, ...] = ()
    outcome: Outcome = Outcome.FINISHED
    error: str = ""
    kind: str = ""
    """Exception type of a failure; equal kinds at equal places are alike."""
    place: str = ""
    """`file:line` in the author's code."""
    frames: str = ""

    @property
    def failed(self) -> bool:
        return not self.outcome.judged

    def packed(self) -> float | list[Any]:
        """Plain data for the wire."""
        if not self.failed and not self.parts and not self.steps:
            return self.value
        return [self.value, dict(self.parts), list(self.steps), self.outcome.value, *self[4:]]


def unpack(packed: float | tuple[Any, ...]) -> RewardResult:
    """Restore what `packed` gave."""
    if isinstance(packed, float):
        return RewardResult(packed)
    value, parts, steps, outcome, *rest = packed
    return RewardResult(value, parts, steps, Outcome(outcome), *rest)


def score_result(result: object, place: str) -> RewardResult:
    """Check what an author returned: a finite number or a `Score` of such; anything else is REWARD_INVALID."""
    score = result if isinstance(result, Score) else Score(result)  # type: ignore[arg-type]
    try:
        value = _finite(score.value)
        parts = {str(name): _finite(part) for name, part in score.parts.items()}
        return RewardResult(value, parts, tuple(_finite(step) for step in score.steps))
    except (TypeError, ValueError) as error:
        kind = type(result).__name__
        message = f"returned {str(result)[:200]!s} ({kind}): {error}; return a finite number or a Score"
        return RewardResult(outcome=Outcome.REWARD_INVALID, error=message, kind=f"invalid {kind}", place=place)


ENGINE_OUTCOMES = (Outcome.ENGINE_ERROR, Outcome.ENGINE_TIMEOUT)
"""Outcomes of a reward that asked an engine: nothing that its author could mend."""


def error_result(error: BaseException, author: Callable[..., Any]) -> RewardResult:
    """Describe an exception: REWARD_ERROR with the frames inside the author's code, the innermost as its place; an engine that
    could not be asked is an outcome of its own."""
    if isinstance(error, InfrastructureError):
        outcome = Outcome.ENGINE_TIMEOUT if isinstance(error, DeadlineExceeded) else Outcome.ENGINE_ERROR
        return RewardResult(outcome=outcome, error=str(error), kind=type(error).__name__, place=where(author))
    trace = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    root = _root(author)
    own = [frame for frame in trace if frame.filename.startswith(root)] or trace[-1:]
    trace = trace[trace.index(own[0]) :] if own else []
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else where(author)
    frames = "".join([*traceback.format_list(trace), *traceback.format_exception_only(error)])
    kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
    return RewardResult(
        outcome=Outcome.REWARD_ERROR, error=f"{kind}: {error} ({place})", kind=kind, place=place, frames=frames
    )


def timeout_result(timeout_s: float, place: str) -> RewardResult:
    message = f"did not answer within timeout_s = {timeout_s:g} ({place})"
    return RewardResult(outcome=Outcome.REWARD_TIMEOUT, error=message, kind="timeout", place=place)


def crash_result(error: BaseException, place: str) -> RewardResult:
    message = f"its process ended twice on this sample ({place}): {error}"
    return RewardResult(outcome=Outcome.REWARD_ERROR, error=message, kind="process ended", place=place)


def where(author: Callable[..., Any]) -> str:
    """The `file:line` of a function or method."""
    code = getattr(inspect.unwrap(author), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(author)


_OURS = tuple(str(Path(__file__).parents[1] / room) + "/" for room in ("rewards", "rpc"))
"""Folders whose frames stand between the thread and the author's code."""


def _root(author: Callable[..., Any]) -> str:
    """The prefix of the author's files: the top-level package of the function, or its one file."""
    function = inspect.unwrap(author)
    code = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else ""
    depth = str(getattr(function, "__module__", "")).count(".")
    if not depth:
        return file
    return str(Path(file).parents[min(depth, len(Path(file).parents)) - 1])


def _finite(value: object) -> float:
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # type: ignore[attr-defined]  # a tensor or array of one number
    if not isinstance(value, Real):
        raise TypeError(f"{type(value).__name__} is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def flatten(trajectory: Trajectory) -> list[Any]:
    """Turn everything in a trajectory into plain lists."""
    return [
        [_flat_message(message) for message in trajectory.messages],
        trajectory.response,
        [
            [n.parent, list(n.tokens), n.sampled, list(n.log_probs), list(n.versions), n.turn, list(n.media)]
            for n in trajectory.forest
        ],
        trajectory.outcome.value,
        list(trajectory.step_rewards),
        dict(trajectory.info),
        list(trajectory.step_turns),
        list(trajectory.states),
    ]


def revive(flat: tuple[Any, ...]) -> Trajectory:
    """Restore a flattened trajectory; sequences came back from the wire as tuples."""
    messages, response, forest, outcome, step_rewards, info, step_turns, states = flat
    return Trajectory(
        tuple(message if isinstance(message, Message) else Message(*message) for message in messages),
        response,
        tuple(Node(*node) for node in forest),
        Outcome(outcome),
        step_rewards,
        info,
        step_turns=step_turns,
        states=states,
    )


def _flat_message(message: Message) -> Any:
    if isinstance(message.content, str) and not message.tool_calls and not message.name:
        return [message.role, message.content]
    return message
