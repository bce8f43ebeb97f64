# SPDX-License-Identifier: Apache-2.0
"""A trainer that hands its calls to a rank object, which exists from `start` to `stop`. This module imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from relax_core.api import Chosen, Chunk, Manifest, RowBatch, Trainer, TrainerSpec, UpdateResult, Version
from relax_core.api.component import OptionsT
from relax_core.api.weights import Payload

if TYPE_CHECKING:
    from relax_core.engine_kit.profiling import StepProfile
    from relax_core.trainer_kit.update import Progress


class StartedRank(Protocol):
    """The started rank of a trainer; each method does the call of `Trainer` that has its name."""

    progress: Progress

    def facts(self) -> Mapping[str, Any]: ...
    def begin_update(self, denominators: Mapping[str, float]) -> None: ...
    def accumulate(self, chunk: Chunk) -> None: ...
    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult: ...
    def abort_update(self) -> None: ...
    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch: ...
    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest: ...
    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int: ...
    def load_published(self, manifest: Manifest, transport: Chosen) -> None: ...
    def save(self, directory: str) -> None: ...
    def snapshot(self, directory: str) -> None: ...
    async def saved(self) -> None: ...
    def load(self, directory: str) -> None: ...
    def export(self, directory: str) -> None: ...
    def stop(self) -> None: ...


RankT = TypeVar("RankT", bound=StartedRank)


class RankTrainer(Trainer[OptionsT], Generic[RankT, OptionsT]):
    """A trainer whose module stays light: `make_rank` imports the module that does the work.

    Life cycle: made -> start -> stop -> start -> ...
    """

    profiles: ClassVar[bool] = True
    _rank: RankT | None = None
    _number = 0
    _profile: StepProfile | None = None
    """The open profile; None: calls are not profiled."""

    @abstractmethod
    def make_rank(self, spec: TrainerSpec) -> RankT:
        """Load model and optimizer of this rank."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        self._rank, self._number = self.make_rank(spec), spec.rank
        return self._rank.facts()

    def begin_step(self, version: Version) -> None:
        self._started.progress.begin(version)

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        self._started.begin_update(denominators)

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        self._started.accumulate(chunk)

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        return self._started.finish_update(denominators)

    def abort_update(self) -> None:
        self._started.abort_update()

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        return self._started.forward(chunk, columns)

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        return self._started.publish(version, transport, location, payload, base)

    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        return self._started.transfer(manifest, transport, receivers, wait_s)

    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        self._started.load_published(manifest, transport)

    def save(self, directory: str) -> None:
        self._started.save(directory)

    def snapshot(self, directory: str) -> None:
        self._started.snapshot(directory)

    async def saved(self) -> None:
        await self._started.saved()

    def load(self, directory: str) -> None:
        self._started.load(directory)

    def export(self, directory: str) -> None:
        self._started.export(directory)

    def start_profile(self, ranks: Sequence[int]) -> None:
        from relax_core.engine_kit.profiling import StepProfile

        self._discard_profile()
        if self._number in ranks:
            self._profile = StepProfile()

    def stop_profile(self, path: str, max_bytes: int) -> int:
        profile, self._profile = self._profile, None
        return 0 if profile is None else profile.write(f"{path}-rank-{self._number}", max_bytes)

    def _discard_profile(self) -> None:
        if self._profile is not None:
            self._profile.discard()
            self._profile = None

    def stop(self) -> None:
        self._discard_profile()
        if self._rank is not None:
            self._rank.stop()
            self._rank = None

    @property
    def _started(self) -> RankT:
        if self._rank is None:
            raise RuntimeError("the trainer was not started; call start first")
        return self._rank
