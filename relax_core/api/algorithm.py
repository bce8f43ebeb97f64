# SPDX-License-Identifier: Apache-2.0
"""Algorithms: pure functions over typed batches. One file reads like its paper's summary.

`advantages` sees whole groups; `loss` sees one packed chunk and never reduces: it returns named terms,
and only the trainer sums them with global counts, so results do not depend on micro-batch or rank splits.
Index t belongs to token t (its log-prob given tokens before it); position 0 of a row is masked.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, cast

from relax_core.api.batch import Column
from relax_core.api.component import Configurable, OptionsT

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["token", "row", "pair"]
Name = Literal["log_probs", "entropy", "values", "top_k", "log_probs_at", "rewards", "routed_experts"]


class Source(StrEnum):
    """Origin of the rows; the planner builds no rollout for the last two."""

    ROLLOUT = "rollout"
    DATASET = "dataset"
    PAIRS = "pairs"


class Scope(StrEnum):
    """The set of samples that the statistics of `advantages` are taken over; BATCH turns streaming off."""

    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Output:
    """Something the forward must give; `k` for top-k, `ids` names the column of token ids to score."""

    name: Name
    k: int = 0
    ids: str = ""

    @property
    def key(self) -> str:
        """Return the name for `PolicyOutputs.output` and `Trainer.forward`: `entropy`, `log_probs_at:<column>`; a
        forward is asked for `top_k:<k>`."""
        return f"{self.name}:{self.ids or self.k}" if self.ids or self.k else self.name

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of what it becomes, in outputs and in the columns of a forward: one, but two of `top_k`."""
        return ("top_k_ids", "top_k_log_probs") if self.name == "top_k" else (self.key,)

    @classmethod
    def parse(cls, key: str) -> Output:
        """The output that has this key. Raises ValueError."""
        name, _, detail = key.partition(":")
        if name == "top_k" and detail.isdecimal() and int(detail):
            return cls("top_k", k=int(detail))
        if name == "log_probs_at" and detail:
            return cls("log_probs_at", ids=detail)
        if name not in ("log_probs", "entropy", "values", "rewards", "routed_experts") or detail:
            raise ValueError(
                f"output {key!r}: give log_probs, entropy, values, rewards, top_k:<k> or log_probs_at:<column>"
            )
        return cls(cast(Name, name))


LOG_PROBS = Output("log_probs")
ENTROPY = Output("entropy")
VALUES_OUTPUT = Output("values")


def top_k(k: int) -> Output:
    """Ids and log-probs of the k likeliest tokens: [tokens, k] each, as `top_k_ids` and `top_k_log_probs`."""
    return Output("top_k", k=k)


def log_probs_at(ids: Column) -> Output:
    """Log-probs of the token ids in a column [tokens, k]."""
    return Output("log_probs_at", ids=ids.name)


@dataclass(frozen=True, slots=True)
class Groups:
    """Whole groups, valid members only, padded to rectangles; `valid` marks what is real."""

    rewards: Tensor
    """[groups, samples]; 0 where not valid."""
    valid: Tensor
    """[groups, samples] bool: the member's outcome was judged."""
    lengths: Tensor
    """[groups, samples] trained tokens of each sample."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Named reward components, [groups, samples] each."""
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Requested token columns of all rows, packed [tokens], rows in (group, sample, row) order."""
    row_lengths: Tensor | None = None
    """[rows] of the packed token columns."""
    row_sample: Tensor | None = None
    """[rows] flat index (group * samples + sample) that each row belongs to."""
    baseline: Tensor | None = None
    """[groups] reward of the greedy sample, which is no member; NaN where it has no verdict; None where nobody asked."""
    step_rewards: Tensor | None = None
    """[groups, samples, turns] what each turn earned; NaN where a turn is missing. None unless the columns `turns` and
    `step_rewards` were asked for."""
    states: Tensor | None = None
    """[groups, samples, turns] keys of what was shown before each turn; 0 where a turn is missing. None unless the columns
    `turns` and `states` were asked for."""
    contexts: Tensor | None = None
    """[groups, samples, turns] keys of the contexts in which turns were taken; 0 where a turn is missing. None unless the
    columns `turns` and `contexts` were asked for."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Per sample [groups, samples], or per token [tokens] in the order of `Groups.token_columns`."""

    values: Tensor
    returns: Tensor | None = None
    """[tokens], for a critic."""


class LossBatch(Protocol):
    """One packed chunk of this rank. Every tensor is [tokens] unless said; rows lie one after another."""

    @property
    def loss_mask(self) -> Tensor:
        """[tokens] bool."""

    @property
    def advantages(self) -> Tensor:
        """[tokens]; a per-sample advantage is already broadcast."""

    @property
    def num_rows(self) -> int: ...

    def column(self, name: str) -> Tensor:
        """A column by name: [tokens, *shape] or [rows, *shape]."""

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Masked sum over each row: [tokens] -> [rows]; right under packing and context parallelism."""

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Masked mean over each row: [tokens] -> [rows]; 0 for a row without trained tokens."""

    def broadcast(self, values: Tensor) -> Tensor:
        """[rows] -> [tokens]."""

    def pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """[rows] -> ([pairs] chosen, [pairs] rejected), where the source is pairs."""


class PolicyOutputs(Protocol):
    """The differentiable results of a forward, as `outputs()` asked for them: log_probs [tokens], entropy [tokens],
    values [tokens], ..."""

    @property
    def log_probs(self) -> Tensor: ...

    def output(self, name: str) -> Tensor:
        """Any requested output by name: `entropy`, `values`, `top_k_ids`, `log_probs_at:<column>`, ..."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss: sum(value * weight over trained positions) / denominator."""

    value: Tensor
    """[tokens], [rows] or [pairs], as `per` says."""
    weight: float | Tensor = 1.0
    denominator: str = "tokens"
    """A global count: tokens, rows, samples, groups, pairs, or one named in `Loss.counts`."""
    per: Reduction = "token"


@dataclass(frozen=True, slots=True)
class Loss:
    """Named terms and metrics; `counts` adds own denominators (this chunk's share of each)."""

    terms: Mapping[str, Term]
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), scalars, summed over chunks and ranks before division; `..._max` and `..._min` keep extremes."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)


class Algorithm(Configurable[OptionsT], Generic[OptionsT]):
    """A learning algorithm: the base of all that turn samples and rewards into advantages and a loss."""

    kind: ClassVar[str] = "algorithm"
    source: ClassVar[Source] = Source.ROLLOUT
    statistics: ClassVar[Scope] = Scope.GROUP
    fits: ClassVar[tuple[str, ...]] = ()
    """Further models trained on the same rows, by role: `("critic",)`."""
    paper: ClassVar[str] = ""
    min_group_size: ClassVar[int] = 1
    max_staleness: ClassVar[int | None] = None
    """The largest staleness it is right for; None: any."""
    greedy_baseline: ClassVar[bool] = False
    """One more sample of each task is drawn at temperature 0 and not trained: its reward is `Groups.baseline`."""
    old_log_probs_tolerance: ClassVar[int] = 0
    """Versions by which `old_log_probs` may differ from the step's start before it is recomputed."""
    denominators: frozenset[str] = frozenset()
    """Names that the loss's terms divide by, where they are few: with one alone a step may be trained while it is still
    being generated. Empty: not told, so each step waits for all of its rows."""
    reads_rewards: bool = True
    """False: a run without rewards trains all the same. A class that says so may have instances that do read them."""
    zero_advantage_skips: bool = False
    """True where a row whose advantages are all 0 has no gradient, so that its forward can be left out."""

    def columns(self) -> frozenset[Column]:
        """Bus columns that `loss` reads, beyond tokens and loss_mask; depends on options."""
        return frozenset()

    def advantage_columns(self) -> frozenset[Column]:
        """Token columns that `advantages` reads beside rewards, tokens and loss_mask: a critic's values."""
        return frozenset()

    def prepared(self) -> frozenset[Column]:
        """Token columns that `prepare` makes and `loss` reads; asking for any, a step waits for all of its rows and for
        `old_log_probs`."""
        return frozenset()

    def prepare(self, batch: LossBatch) -> Mapping[str, Tensor]:
        """The columns of `prepared`, from all rows of a step at once, before its first update."""
        raise NotImplementedError

    def outputs(self) -> frozenset[Output]:
        """Return the outputs that the forward must give."""
        return frozenset({LOG_PROBS})

    def advantages(self, groups: Groups) -> Advantages:
        """Credit samples or tokens; only where the source is rollout."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        """Per-token, per-row or per-pair terms of one chunk."""
        raise NotImplementedError

    def fit_columns(self, fit: str) -> frozenset[Column]:
        """Bus columns that `fit_loss` reads, beyond tokens and loss_mask."""
        return frozenset()

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        """The loss of a further model named in `fits`."""
        raise NotImplementedError
