# SPDX-License-Identifier: Apache-2.0
"""Trajectories, the results of attempts at a task: messages for people and rewards, a forest of tokens for training.

A node is a sequence of sampled or of given tokens. Branches share the nodes of their prefix; compaction and sub-agents
start new roots. A row is one path from a root to a leaf. The first row with a token trains it; later rows mask it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeAlias

from relax_core.api.task import Message


class Outcome(StrEnum):
    """The way an attempt ended; only `judged` outcomes have a reward and can be trained."""

    FINISHED = "finished"
    """The policy ended its turn, or the environment reported `done`."""
    TRUNCATED = "truncated"
    """A token or turn limit ended the sample; rewards still judge it."""
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_INVALID = "reward_invalid"
    """The reward is NaN, infinite or not a number."""
    REWARD_UNREADABLE = "reward_unreadable"
    """The verdict of a judge could not be parsed (`reward.Unreadable`)."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENGINE_ERROR = "engine_error"
    """The policy's engines, or a pool or sandbox that a reward called, failed."""
    ENGINE_TIMEOUT = "engine_timeout"
    """A turn was not sampled within `rollout.turn_timeout_s`, or a pool that a reward called did not answer in time."""
    MEDIA_ERROR = "media_error"
    INVALID_TASK = "invalid_task"
    """The prompt is too long, or no reward applies to the task and the environment gave none."""

    judged: bool
    """True if rewards judge such attempts; an attribute, since it is read several times for each sample."""

    def __init__(self, value: str) -> None:
        self.judged = value in ("finished", "truncated")


class DropReason(StrEnum):
    """The reason why an issued attempt is never trained."""

    STALE = "stale"
    """The group became too old for the staleness bound."""
    DEADLINE = "deadline"
    """The group was not finished by the deadline of a step."""
    FAILED = "failed"
    """The attempt's outcome is never judged, such as an error or a timeout."""
    TOO_FEW_VALID = "too_few_valid"
    FILTERED = "filtered"
    SPARE = "spare"
    """The group was an over-sampled group that no step needed."""
    REGENERATED = "regenerated"
    ABANDONED = "abandoned"
    """A rollback abandoned the weights that sampled some of the tokens."""
    RESUMED = "resumed"
    """The attempt was in flight when the run stopped, or a rollback lost its rows; the group was issued again."""


@dataclass(frozen=True, slots=True)
class Node:
    """A sequence of tokens in the forest of a sample: sampled by the policy, or given to the policy."""

    parent: int | None
    """Index in the forest of the node before this one; None for a root."""
    tokens: tuple[int, ...]
    sampled: bool
    """True: the policy sampled the tokens."""
    log_probs: tuple[float, ...] = ()
    """[tokens] of a sampled node: log-probs under the distribution that was sampled."""
    versions: tuple[int, ...] = ()
    """[tokens] of a sampled node: step of the oldest weights that each token depends on."""
    turn: int = -1
    """Number of the turn that sampled the node, from 0 in the order in which turns began; -1 for given tokens."""
    media: tuple[str, ...] = ()
    """Keys of the media of a given node, in the order of their placeholders."""
    routed_experts: bytes = field(default=b"", repr=False)
    """[tokens, layers, top_k] experts that the tokens visited during sampling; empty: not known."""
    routed_valid: bytes = field(default=b"", repr=False)
    """[tokens] 1 if `routed_experts` are known; 0 for a sample's last token, which never goes through the model."""
    discarded: str = ""
    """The reason why the sampled tokens are never trained, such as `undelivered`; empty: they may be trained."""


def context_key(name: str) -> int:
    """Return the signed 64-bit key of a context's name in the column `contexts`; 0 for no name."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) if name else 0


Path: TypeAlias = tuple[tuple[Node, bool], ...]
"""The nodes from a root to a leaf, each with True if this row trains the node."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence; all tuples are [tokens], and given tokens have log-prob 0 and version -1."""

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The result of one attempt, as rewards, filters and viewers get it."""

    messages: tuple[Message, ...]
    """The whole conversation, including the prompt."""
    response: str
    """Text of the policy's last turn, without special tokens."""
    forest: tuple[Node, ...]
    outcome: Outcome = Outcome.FINISHED
    step_rewards: tuple[float, ...] = ()
    """Rewards that the environment gave, in order of time."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts from the environment, and `error` if the sample failed."""
    newest: Mapping[int, int] = field(default_factory=dict)
    """incarnation -> newest step that sampled a token; above `Node.versions` if an update kept old KV caches."""
    step_turns: tuple[int, ...] = ()
    """Turn number of each entry of `step_rewards`, -1 for the whole sample; empty: reward i belongs to turn i."""
    states: tuple[int, ...] = ()
    """[turns] key of the state before each turn."""
    contexts: tuple[str, ...] = ()
    """[turns] name of each turn's context; empty: no context has a name."""
    times: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds in `queue` (turns that wait for an engine), `generate` and `environment`, without pauses of engines."""

    @property
    def environment_reward(self) -> float:
        return float(sum(self.step_rewards))

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Return the environment's reward for each turn, up to the last turn with a reward.

        Rewards for the whole sample are left out.
        """
        if not self.step_turns:
            return self.step_rewards
        rewards = [0.0] * (max(self.step_turns) + 1)
        for turn, reward in zip(self.step_turns, self.step_rewards, strict=True):
            if turn >= 0:
                rewards[turn] += reward
        return tuple(rewards)

    @property
    def num_sampled(self) -> int:
        return sum([len(node.tokens) for node in self.forest if node.sampled])

    @property
    def num_discarded(self) -> Mapping[str, int]:
        """Count the sampled tokens that are never trained, by reason."""
        counts = Counter[str]()
        for node in self.forest:
            if node.discarded:
                counts[node.discarded] += len(node.tokens)
        return counts

    def paths(self) -> tuple[Path, ...]:
        """Return the nodes of each row: one path for each leaf, in the order of the leaves."""
        forest = self.forest
        chained = [node.parent for node in forest] == [None, *range(len(forest) - 1)]
        if chained and not any(node.discarded for node in forest):  # without branches, as most samples are
            return (tuple([(node, node.sampled) for node in forest]),)
        seen: set[int] = set()
        return tuple(_path(forest, leaf, seen) for leaf in _leaves(forest))

    def rows(self) -> tuple[Row, ...]:
        """Return one row for each leaf, in the order of the leaves; rows never end in a discarded turn."""
        return tuple(map(_row, self.paths()))


def _leaves(forest: tuple[Node, ...]) -> Iterator[int]:
    parents = {node.parent for node in forest}
    if not any(node.discarded for node in forest):
        return (index for index in range(len(forest)) if index not in parents)
    kept: set[int | None] = set()
    """Nodes that are trained, leaves that are not discarded, and the ancestors of both."""
    for index in reversed(range(len(forest))):
        node = forest[index]
        if index in kept or (not node.discarded and (node.sampled or index not in parents)):
            kept |= {index, node.parent}
    led_on = {forest[index].parent for index in kept if index is not None}
    return (index for index in range(len(forest)) if index in kept and index not in led_on)


def _path(forest: tuple[Node, ...], leaf: int, seen: set[int]) -> Path:
    path: list[tuple[Node, bool]] = []
    at: int | None = leaf
    while at is not None:
        node = forest[at]
        path.append((node, node.sampled and not node.discarded and at not in seen))
        seen.add(at)
        at = node.parent
    return tuple(reversed(path))


def _row(path: Path) -> Row:
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    for node, trained in path:
        width = len(node.tokens)
        tokens += node.tokens
        mask += [int(trained)] * width
        log_probs += node.log_probs if node.sampled else [0.0] * width
        versions += node.versions if node.sampled else [-1] * width
    return Row(tuple(tokens), tuple(mask), tuple(log_probs), tuple(versions))
