# SPDX-License-Identifier: Apache-2.0
"""Trajectories, the results of one attempt at a task: messages for people and rewards, a forest of tokens for training.

A node is one run of tokens with one origin; branches share their prefix nodes; compaction and sub-agents start new roots.
A row is one root-to-leaf path. A token is trained in the first row that contains it and masked in the others.
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
    """Written into the `outcome` column and counted in the ledger."""

    FINISHED = "finished"
    """The policy ended its turn or the environment was done."""
    TRUNCATED = "truncated"
    """A token or turn limit cut it; still judged."""
    REWARD_ERROR = "reward_error"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_INVALID = "reward_invalid"
    """NaN, infinite or not a number."""
    REWARD_UNREADABLE = "reward_unreadable"
    """A judge's verdict could not be read, also when it was asked again."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENGINE_ERROR = "engine_error"
    """The policy's engines, or the engines or the sandbox that a reward asked, could not answer."""
    ENGINE_TIMEOUT = "engine_timeout"
    """A turn was not sampled within `rollout.turn_timeout_s`, or an engine that a reward asked did not answer in time."""
    MEDIA_ERROR = "media_error"
    INVALID_TASK = "invalid_task"

    @property
    def judged(self) -> bool:
        return self._value_ in ("finished", "truncated")  # by text: it is asked of every sample again and again


class DropReason(StrEnum):
    """Why an issued attempt will never be trained."""

    EXPIRED = "expired"
    DEADLINE = "deadline"
    FAILED = "failed"
    """Its outcome was not judged."""
    TOO_FEW_VALID = "too_few_valid"
    FILTERED = "filtered"
    SPARE = "spare"
    REGENERATED = "regenerated"
    ABANDONED = "abandoned"
    """Trained only in a lineage of weights that a rollback gave up."""
    RESUMED = "resumed"
    """In flight when the run stopped; issued again on resume."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens: sampled by the policy, or given to it."""

    parent: int | None
    """Index of the node before it in the forest; None for a root."""
    tokens: tuple[int, ...]
    sampled: bool
    """True where the policy's own tokens are (loss_mask = 1)."""
    log_probs: tuple[float, ...] = ()
    """[tokens] of a sampled node, under the distribution it was sampled from."""
    versions: tuple[int, ...] = ()
    """[tokens] of a sampled node: step of the oldest weights that each token depends on."""
    turn: int = -1
    """Turn of the sample that sampled it, counted from 0 in the order in which they began; -1 for given tokens."""
    media: tuple[str, ...] = ()
    """Keys of the media that tokens of a given node hold place for, in order."""
    routes: bytes = field(default=b"", repr=False)
    """[tokens, layers, top_k] experts that its tokens visited when they were sampled from; empty: not known."""
    routed: bytes = field(default=b"", repr=False)
    """[tokens] 1 where `routes` are known: a sample's last token was never fed through the model."""
    discarded: str = ""
    """Why its tokens are never trained although the policy sampled them, such as `undelivered`; empty: they are."""


def context_key(name: str) -> int:
    """The signed 64-bit number of a context's name in the column `contexts`; 0 for no name."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) if name else 0


Path: TypeAlias = tuple[tuple[Node, bool], ...]
"""From a root to a leaf: each node, and whether it is trained in this row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence. All tuples are [tokens]; given tokens have log-prob 0 and version -1."""

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt, as rewards, filters and viewers see it."""

    messages: tuple[Message, ...]
    """The whole conversation, prompt included."""
    response: str
    """The text of the policy's last turn, special tokens removed."""
    forest: tuple[Node, ...]
    outcome: Outcome = Outcome.FINISHED
    step_rewards: tuple[float, ...] = ()
    """What the environment gave, in the order in which it came."""
    info: Mapping[str, Any] = field(default_factory=dict)
    newest: Mapping[int, int] = field(default_factory=dict)
    """By incarnation of the weights that sampled a token of it, their newest step: above its `versions` where a KV cache
    outlived an update. Empty: not known."""
    step_turns: tuple[int, ...] = ()
    """Turn that each of `step_rewards` was given for; empty: one a turn."""
    states: tuple[int, ...] = ()
    """[turns] key of what the policy was shown before each turn."""
    contexts: tuple[str, ...] = ()
    """[turns] name of the context in which each was taken; empty: none has a name."""
    times: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds that it spent in `queue`, before engines had its turns, in `generate`, and in its `environment`; pauses of the
    engines are in none of them."""

    @property
    def environment_reward(self) -> float:
        return float(sum(self.step_rewards))

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """[turns, as far as any was given] what the environment gave for each turn."""
        if not self.step_turns:
            return self.step_rewards
        rewards = [0.0] * (max(self.step_turns) + 1)
        for turn, reward in zip(self.step_turns, self.step_rewards, strict=True):
            rewards[turn] += reward
        return tuple(rewards)

    @property
    def num_sampled(self) -> int:
        return sum(len(node.tokens) for node in self.forest if node.sampled)

    @property
    def num_discarded(self) -> Mapping[str, int]:
        """Sampled tokens that are never trained, by reason."""
        counts = Counter[str]()
        for node in self.forest:
            if node.discarded:
                counts[node.discarded] += len(node.tokens)
        return counts

    def paths(self) -> tuple[Path, ...]:
        """The nodes of each row: one path a leaf, in order of the leaves."""
        seen: set[int] = set()
        return tuple(_path(self.forest, leaf, seen) for leaf in _leaves(self.forest))

    def rows(self) -> tuple[Row, ...]:
        """One row a leaf, in order of the leaves; a discarded turn is the leaf of none."""
        return tuple(map(_row, self.paths()))


def _leaves(forest: tuple[Node, ...]) -> Iterator[int]:
    parents = {node.parent for node in forest}
    if not any(node.discarded for node in forest):
        return (index for index in range(len(forest)) if index not in parents)
    kept: set[int | None] = set()
    """Nodes that are trained, or that lead to one or to an end of the sample."""
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
