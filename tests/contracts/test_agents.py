# SPDX-License-Identifier: Apache-2.0
"""What a sample may be: an agent that branches into three rows, and a video seen in two views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from relax_core.api import (
    Action,
    AttemptId,
    Environment,
    Media,
    Message,
    ModalityProcessor,
    Node,
    Observation,
    Options,
    Outcome,
    Part,
    ProcessedMedia,
    Ragged,
    RowBatch,
    RowId,
    Sealed,
    Session,
    Task,
    Tool,
    Trajectory,
)
from relax_core.api.task import ToolCall
from relax_core.rpc import messages


class Scripted:
    """A session whose policy says the next number of a list; every branch knows its place in one forest."""

    def __init__(self, forest: list[Node], says: list[int], at: int | None) -> None:
        self.forest, self.says, self.at = forest, says, at
        self.rewards: list[float] = []

    async def generate(
        self,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        told: Callable[[Action], None] | None = None,
    ) -> Action:
        token = self.says.pop(0)
        self._append(Node(self.at, (token,), True, (-0.5,), (3,)))
        return Action(str(token), (token,))

    def observe(self, observation: Observation | str) -> None:
        text = observation if isinstance(observation, str) else str(observation.content)
        self._append(Node(self.at, tuple(map(ord, text)), False))

    def fork(self, name: str = "") -> Self:
        return self._branch(self.at)

    def restart(
        self,
        prompt: str | tuple[Message, ...],
        tools: tuple[Tool, ...] | None = None,
        name: str = "",
        context: str | None = None,
    ) -> Self:
        branch = self._branch(None)
        branch.observe(prompt if isinstance(prompt, str) else "".join(message.text for message in prompt))
        return branch

    def discard(self, reason: str) -> None:
        assert self.at is not None
        self.forest[self.at] = replace(self.forest[self.at], discarded=reason)

    def reward(self, value: float) -> None:
        self.rewards.append(value)

    def note(self, info: Mapping[str, Any]) -> None:
        raise AssertionError("nobody asked for it")

    def _branch(self, at: int | None) -> Self:
        branch = type(self)(self.forest, self.says, at)
        branch.rewards = self.rewards
        return branch

    def _append(self, node: Node) -> None:
        self.forest.append(node)
        self.at = len(self.forest) - 1


class Explorer(Environment[Options]):
    """Thinks once, tries two ways on, and asks a sub-agent that begins from nothing."""

    gives_reward: ClassVar[bool] = True

    async def run(self, task: Task, seed: int, session: Session) -> None:
        await session.generate()
        other = session.fork()
        session.observe("L")
        other.observe("R")
        await session.generate()
        await other.generate()
        helper = session.restart("?")
        await helper.generate()
        session.reward(1.0)


async def explored() -> tuple[Trajectory, Scripted]:
    session = Scripted([], [10, 11, 12, 13], None)
    session.observe("p")
    await Explorer().run(Task("t", "p"), 0, session)
    return Trajectory((), "13", tuple(session.forest), step_rewards=tuple(session.rewards)), session


async def test_a_branching_agent_gives_three_rows_that_train_each_token_once() -> None:
    trajectory, _ = await explored()
    assert Explorer.drives() and trajectory.environment_reward == 1.0
    rows = trajectory.rows()
    assert [row.tokens for row in rows] == [
        (ord("p"), 10, ord("L"), 11),
        (ord("p"), 10, ord("R"), 12),
        (ord("?"), 13),
    ]
    assert [row.loss_mask for row in rows] == [(0, 1, 0, 1), (0, 0, 0, 1), (0, 1)]
    assert sum(sum(row.loss_mask) for row in rows) == trajectory.num_sampled
    assert rows[1].log_probs == (0.0, -0.5, 0.0, -0.5) and rows[1].versions == (-1, 3, -1, 3)


async def test_its_rows_travel_as_one_sealed_sample() -> None:
    rows = (await explored())[0].rows()
    attempt = AttemptId(4, 1, 0)
    masks = Ragged.of([np.array(row.loss_mask, np.uint8) for row in rows])
    batch = RowBatch(tuple(RowId(*attempt, number) for number in range(len(rows))), {"loss_mask": masks})
    sealed = Sealed(attempt, len(batch), Outcome.FINISHED, 1.0, floor=3, trained_tokens=int(masks.values.sum()))
    back, same = messages.decode(messages.encode((batch, sealed)))
    assert {row.attempt_id for row in back.ids} == {same.attempt} and same.num_rows == 3
    assert same.trained_tokens == 4


class Frames(ModalityProcessor[Options]):
    """One number a second of video, one placeholder a frame."""

    medium: ClassVar[str] = "video"

    def budget(self, media: Media, model: Mapping[str, Any]) -> int:
        return 10 if media.view is None else int(media.view[1] - media.view[0])

    def process(self, media: Media, data: bytes, model: Mapping[str, Any]) -> ProcessedMedia:
        frames = np.frombuffer(data, np.uint8)
        return ProcessedMedia(media.key, {"frames": frames}, len(frames))

    def view(self, whole: ProcessedMedia, start_s: float, end_s: float) -> ProcessedMedia:
        frames = whole.tensors["frames"][int(start_s) : int(end_s)]
        return ProcessedMedia(whole.key, {"frames": frames}, len(frames))


def test_two_views_of_a_video_share_what_is_stored_and_are_named_in_the_row() -> None:
    views = [Media("video", "clip.mp4", "k1", (0.0, 3.0)), Media("video", "clip.mp4", "k1", (5.0, 9.0))]
    task = Task("t", (Message("user", tuple(Part(media=view) for view in views)),))
    processor = Frames()
    store = {"k1": processor.process(Media("video", "clip.mp4", "k1"), bytes(range(10)), {})}
    shown = [processor.view(store[view.key], *view.view) for view in views if view.view]
    assert [each.num_placeholders for each in shown] == [processor.budget(view, {}) for view in views] == [3, 4]
    assert all(np.shares_memory(each.tensors["frames"], store["k1"].tensors["frames"]) for each in shown)
    references = tuple(view.reference for view in views)
    assert references == ("k1#t=0.0,3.0", "k1#t=5.0,9.0")
    assert messages.decode(messages.encode((task, references))) == (task, references)


def test_arrays_in_the_arguments_of_a_call_are_lists_in_whatever_process() -> None:
    call = ToolCall("zoom", {"box": [1, [2, 3]], "more": {"of": []}})
    action = messages.decode(messages.encode(Action("", (), (call,))))
    assert action.tool_calls == (call,) and action.tool_calls[0].arguments["box"] == [1, [2, 3]]
    assert ToolCall("zoom", {"box": (1, (2,))}).arguments == {"box": [1, [2]]}
