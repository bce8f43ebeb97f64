# SPDX-License-Identifier: Apache-2.0
"""The contract of algorithms: pure functions over typed batches.

`advantages` gets whole groups. `loss` gets one packed chunk and returns named terms without reducing them. The trainer
alone sums the terms and divides by global counts, so results do not depend on the split into micro-batches and ranks.
Entry t of a token tensor belongs to token t, such as its log-prob given the tokens before it. Entry 0 of a row is
masked.
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
    """The origin of the rows; runs on DATASET and PAIRS have no rollout."""

    ROLLOUT = "rollout"
    DATASET = "dataset"
    PAIRS = "pairs"


class Scope(StrEnum):
    """The set of samples over which `advantages` computes its statistics; BATCH turns streaming off."""

    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a model's forward pass."""

    name: Name
    k: int = 0
    """Number of tokens for `top_k`."""
    ids: str = ""
    """Name of the column with the token ids to score, for `log_probs_at`."""

    @property
    def key(self) -> str:
        """Return the name of the output in `Trainer.forward`, and in `PolicyOutputs.output` except for `top_k:<k>`."""
        return f"{self.name}:{self.ids or self.k}" if self.ids or self.k else self.name

    @property
    def gives(self) -> tuple[str, ...]:
        """Return the names of the results in `PolicyOutputs` and in forwarded columns: two for `top_k`, else one."""
        return ("top_k_ids", "top_k_log_probs") if self.name == "top_k" else (self.key,)

    @classmethod
    def parse(cls, key: str) -> Output:
        """Return the output with this key. Raises ValueError for an unknown key."""
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
    """Request the k most likely tokens: `top_k_ids` and `top_k_log_probs`, [tokens, k] each."""
    return Output("top_k", k=k)


def log_probs_at(ids: Column) -> Output:
    """Request the log-probs of the token ids in a column: [tokens, k]."""
    return Output("log_probs_at", ids=ids.name)


@dataclass(frozen=True, slots=True)
class Groups:
    """The rewards and lengths of whole groups, padded to equal group sizes; `valid` marks the samples to use."""

    rewards: Tensor
    """[groups, samples] reward of each sample; 0 where `valid` is False."""
    valid: Tensor
    """[groups, samples] bool: the sample's outcome was judged and its reward is finite; False for padding."""
    lengths: Tensor
    """[groups, samples] number of trained tokens of each sample."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Named reward components, [groups, samples] each; 0 where `valid` is False or the sample has no such component.

    A key is the name of a reward, `REWARD/PART` for a part of its score, or `environment`. Values are not weighted.
    """
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the rewards in `[[rewards]]`, by the reward's name; empty: only the environment gives rewards."""
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The columns of `Algorithm.advantage_columns`, [tokens] each: all rows, packed in (group, sample, row) order."""
    row_lengths: Tensor | None = None
    """[rows] length of each row in the packed token columns."""
    row_sample: Tensor | None = None
    """[rows] flat index (group * samples + sample) of the sample that each row belongs to."""
    baseline: Tensor | None = None
    """[groups] reward of the greedy sample, left out of `rewards`; NaN: not judged. None: no greedy samples."""
    step_rewards: Tensor | None = None
    """[groups, samples, turns] reward that each turn earned; NaN where a turn is missing. None unless
    `advantage_columns` has `turns` and `step_rewards`."""
    sample_rewards: Tensor | None = None
    """[groups, samples] part of `rewards` that was given for the whole sample, in float32 precision; `step_rewards` has
    this part at the sample's last turn. None unless `step_rewards` is there."""
    states: Tensor | None = None
    """[groups, samples, turns] key of the state before each turn; 0 where a turn is missing. None unless
    `advantage_columns` has `turns` and `states`."""
    contexts: Tensor | None = None
    """[groups, samples, turns] key of the context of each turn; 0 where a turn is missing. None unless
    `advantage_columns` has `turns` and `contexts`."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The result of `Algorithm.advantages`."""

    values: Tensor
    """One value per sample [groups, samples], or one per token [tokens] in the order of `Groups.token_columns`."""
    returns: Tensor | None = None
    """[tokens] returns, the targets that a critic learns to predict."""


class LossBatch(Protocol):
    """One chunk of this rank's rows, packed one after another without padding."""

    @property
    def loss_mask(self) -> Tensor:
        """Return the trained tokens: [tokens] bool."""

    @property
    def advantages(self) -> Tensor:
        """Return the advantages: [tokens]. An advantage of a whole sample is repeated for each of its tokens."""

    @property
    def num_rows(self) -> int: ...

    def column(self, name: str) -> Tensor:
        """Return a column by name: [tokens, *shape] or [rows, *shape]."""

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum the trained tokens of each row, also under packing and context parallelism: [tokens] -> [rows]."""

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average the trained tokens of each row: [tokens] -> [rows]; 0 for a row without trained tokens."""

    def sample_mean(self, values: Tensor) -> Tensor:
        """Return each row's share of the average over the trained tokens of all rows of its sample: [tokens] -> [rows].

        The shares of a sample's rows, which may be in several chunks, add up to this average.
        """

    def broadcast(self, values: Tensor) -> Tensor:
        """Repeat the value of each row for its tokens: [rows] -> [tokens]."""

    def pair(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows into pairs, if the source is PAIRS: [rows] -> ([pairs] chosen, [pairs] rejected)."""


class PolicyOutputs(Protocol):
    """The differentiable results of a forward pass: log_probs [tokens] and the `Algorithm.outputs`."""

    @property
    def log_probs(self) -> Tensor: ...

    def output(self, name: str) -> Tensor:
        """Return a requested output by name: `entropy` [tokens], `top_k_ids` [tokens, k], ..."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss: sum(value * weight over trained positions) / denominator."""

    value: Tensor
    """[tokens], [rows] or [pairs], according to `per`."""
    weight: float | Tensor = 1.0
    denominator: str = "tokens"
    """Name of a global count: tokens, rows, samples, groups, pairs, or a key of `Loss.counts`."""
    per: Reduction = "token"


@dataclass(frozen=True, slots=True)
class Loss:
    """The named terms and metrics of one chunk."""

    terms: Mapping[str, Term]
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), both summed over chunks and ranks, then divided. `..._max`, `..._min`: the extreme sum."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> this chunk's share of a further global count, which terms may use as `denominator`."""


class Algorithm(Configurable[OptionsT], Generic[OptionsT]):
    """A learning algorithm: turns samples and rewards into advantages and a loss."""

    kind: ClassVar[str] = "algorithm"
    source: ClassVar[Source] = Source.ROLLOUT
    statistics: ClassVar[Scope] = Scope.GROUP
    fits: ClassVar[tuple[str, ...]] = ()
    """Roles of further models that train on the same rows, such as `("critic",)`."""
    paper: ClassVar[str] = ""
    min_group_size: ClassVar[int] = 1
    """Smallest allowed `rollout.group_size`; groups with fewer valid samples are dropped."""
    max_staleness: ClassVar[int | None] = None
    """Largest staleness, in versions, for which the algorithm is correct; None: any."""
    max_updates_per_step: ClassVar[int | None] = None
    """Largest number of updates per step, `batch.updates_per_step` times `batch.passes`, for which the algorithm is
    correct; None: any."""
    greedy_baseline: ClassVar[bool] = False
    """True: each group gets one more sample, at temperature 0 and never trained; its reward is `Groups.baseline`."""
    denominators: frozenset[str] = frozenset()
    """Names of the counts that the loss's terms divide by. With exactly one, a step can be trained while its last
    groups are still being generated. With several, or none named here, each step waits for all of its rows."""
    reads_rewards: bool = True
    """False: the algorithm trains without rewards. An instance may set True although its class says False."""
    zero_advantage_skips: bool = False
    """True: a row whose advantages are all 0 has no gradient, so the trainer skips its forward pass."""

    def columns(self) -> frozenset[Column]:
        """Return the bus columns that `loss` reads besides tokens and loss_mask; they may depend on the options."""
        return frozenset()

    def advantage_columns(self) -> frozenset[Column]:
        """Return the token columns that `advantages` reads besides rewards, tokens and loss_mask."""
        return frozenset()

    def reward_names(self) -> frozenset[str]:
        """Return the keys of `Groups.parts` that the options name; the run is refused if one of them cannot exist."""
        return frozenset()

    def prepared(self) -> frozenset[Column]:
        """Return the token columns that `prepare` computes for `loss`.

        If there is such a column, a step waits for all of its rows and for `old_log_probs`.
        """
        return frozenset()

    def prepare(self, batch: LossBatch) -> Mapping[str, Tensor]:
        """Compute the columns of `prepared` from all rows of a step, before its first update."""
        raise NotImplementedError

    def outputs(self) -> frozenset[Output]:
        """Return the outputs of the forward pass that `loss` reads."""
        return frozenset({LOG_PROBS})

    def advantages(self, groups: Groups) -> Advantages:
        """Compute the advantages of samples or tokens; called only if the source is ROLLOUT."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        """Return the per-token, per-row or per-pair terms of one chunk."""
        raise NotImplementedError

    def fit_columns(self, fit: str) -> frozenset[Column]:
        """Return the bus columns that `fit_loss` reads for the role `fit`, besides tokens and loss_mask."""
        return frozenset()

    def fit_loss(self, fit: str, batch: LossBatch, outputs: PolicyOutputs) -> Loss:
        """Return the loss of the further model with the role `fit`, one of `fits`."""
        raise NotImplementedError
