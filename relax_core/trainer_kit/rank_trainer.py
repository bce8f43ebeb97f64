# SPDX-License-Identifier: Apache-2.0
"""A trainer in two classes: a light one for plans and estimates, and its rank, in a module that loads heavy libraries.

`start` of the light trainer returns the rank, which takes its place. This module imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from relax_core.api import Trainer, TrainerSpec, Version
from relax_core.api.component import OptionsT

if TYPE_CHECKING:
    from relax_core.engine_kit.profiling import StepProfile
    from relax_core.trainer_kit.update import Progress


class RankTrainer(Trainer[OptionsT], Generic[OptionsT]):
    """A trainer that plans and estimates. All other calls go to the rank that `start` returns."""

    profiles: ClassVar[bool] = True

    rank_class: ClassVar[str]
    """`module:Class` of the rank, a subclass of `StartedRank` and of this class."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any] | Trainer[Any]:
        module, _, name = self.rank_class.partition(":")
        rank: Trainer[Any] = getattr(import_module(module), name)(self.options)
        rank.build = self.build
        return rank

    def _of_rank(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the trainer was not started; call `start`, then the rank that it returns")

    begin_update = accumulate = finish_update = forward = _of_rank
    publish = transfer = load_published = save = load = export = start_profile = stop_profile = _of_rank


class StartedRank(Trainer[Any]):
    """The rank of a `RankTrainer`: its start and end, its steps and profiles.

    Life cycle: made -> start -> stop -> start -> ...
    """

    progress: Progress
    _spec: TrainerSpec
    _started = False
    _profile: StepProfile | None = None
    """The open profile; None: calls are not profiled."""

    @abstractmethod
    def begin(self, spec: TrainerSpec) -> None:
        """Load model and optimizer."""

    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Return the facts that `start` returns."""

    @abstractmethod
    def end(self) -> None:
        """Release devices and process groups."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        self._spec = spec
        self.begin(spec)
        self._started = True
        return self.facts()

    def begin_step(self, version: Version) -> None:
        self.progress.begin(version)

    def start_profile(self, ranks: Sequence[int]) -> None:
        from relax_core.engine_kit.profiling import StepProfile

        self._discard_profile()
        if self._spec.rank in ranks:
            self._profile = StepProfile()

    def stop_profile(self, path: str, max_bytes: int) -> int:
        profile, self._profile = self._profile, None
        return 0 if profile is None else profile.write(f"{path}-rank-{self._spec.rank}", max_bytes)

    def _discard_profile(self) -> None:
        if self._profile is not None:
            self._profile.discard()
            self._profile = None

    def stop(self) -> None:
        self._discard_profile()
        if self._started:
            self.end()
        kept = ("options", "build")
        self.__dict__ = {name: value for name, value in vars(self).items() if name in kept}  # frees the model
