# SPDX-License-Identifier: Apache-2.0
"""The decoding thread. All work with the model runs on it: iterations, and commands between two iterations.

The thread admits waiting calls while there is room, and merges batches if this needs little padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from relax_core.api.engine import Delta
from relax_core.api.weights import Version
from relax_core.engine_kit.engine_thread import EngineThread, OpenRequest
from relax_plugin_transformers.batch import Batch, Finished, prompt_of, slots_of
from relax_plugin_transformers.model import CausalModel, by_length
from relax_plugin_transformers.options import TransformersOptions


class Decoder(EngineThread):
    """The decoding thread with its waiting calls and its running batches.

    Life of a request: `waiting -> running in a batch -> finished | aborted`.
    """

    def __init__(
        self, model: CausalModel, version: Version, options: TransformersOptions, *, rows: int, serial: bool,
        keeps_caches: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(version, "relax-decoder")
        self.model = model
        self._options = options
        self._max_rows = rows
        self._serial = serial
        """Run one call at a time and never merge batches, so that the same calls give the same bits."""
        self._keeps_caches = keeps_caches
        """Keep the caches of running requests when weights change; new requests always run their prompt anew."""
        self._waiting: deque[deque[OpenRequest]] = deque()
        self._batches: list[Batch] = []

    @property
    def running(self) -> int:
        return sum(map(len, self._batches))

    @property
    def waiting(self) -> int:
        return sum(map(len, tuple(self._waiting)))

    # -- commands: run on the thread ------------------------------------------------------------------------------

    def _enter(self, call: Sequence[OpenRequest]) -> None:
        self._waiting.append(deque(call))

    def _abort(self, names: list[str]) -> None:
        ids = frozenset(names)
        finished: Finished = []
        for call in self._waiting:
            step = self.version.step
            gone = [member for member in call if member.request.id in ids]
            finished += [(member, Delta(member.request.id, (), (), step, step, "abort")) for member in gone]
            kept = [member for member in call if member.request.id not in ids]
            call.clear()
            call.extend(kept)
        for batch in self._batches:
            rows = [row for row, member in enumerate(batch.members) if member.request.id in ids]
            if rows:
                finished += batch.take(rows, "abort", self.version.step)
        self._tell(finished)
        self._forget_empty()

    def flush(self) -> None:
        for batch in self._batches:
            self._tell(batch.flush(self.version.step))

    def renew(self, version: Version) -> None:
        """Sample with this version from the next token on. Keep caches only if the trainer's incarnation is the same."""
        keeps = self._keeps_caches and version.incarnation == self.version.incarnation
        for batch in self._batches:
            if keeps:
                batch.outlive(self.version.step)
            else:
                batch.drop_cache()
        self.version = version

    def drop_caches(self) -> int:
        return sum(batch.drop_cache() for batch in self._batches)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            super()._run()

    def _idle(self) -> bool:
        return self._stopping or self.paused or bool(self.offloaded) or not (self._waiting or self._batches)

    def _close(self) -> None:
        self._waiting.clear()
        self._batches.clear()

    def _iterate(self) -> None:
        self._admit()
        for batch in self._batches:
            if batch.full:
                self._tell(batch.flush(self.version.step))
            batch.step(self.model)
            self._tell(batch.take_finished(self.version.step))
        self._forget_empty()

    def _admit(self) -> None:
        if self._waiting and not (self._serial and self._batches):
            for members in by_prompt_length(self._take_fitting(), self._options.max_prefill_tokens):
                batch = Batch.prefill(members, self.model, self._options.deltas_every)
                self._tell(batch.take_finished(self.version.step))
                alike = (other for other in self._batches if other.has_cache and other.cheap_to_merge(batch))
                if len(batch) and not self._serial and (other := next(alike, None)):
                    other.merge(batch)
                elif len(batch):
                    self._batches.append(batch)

    def _take_fitting(self) -> list[OpenRequest]:
        """Return the requests that waited longest, as many as fit; an empty engine always takes a request."""
        rows = self._max_rows - self.running
        slots = self._options.max_batch_tokens - sum(batch.slots for batch in self._batches)
        taken: list[OpenRequest] = []
        while self._waiting:
            call = self._waiting[0]
            while call and (not (taken or self._batches) or (rows > 0 and slots_of(call[0]) <= slots)):
                taken.append(call.popleft())
                rows, slots = rows - 1, slots - slots_of(taken[-1])
            if call or (self._serial and taken):
                break
            self._waiting.popleft()
        return taken

    def _forget_empty(self) -> None:
        self._batches = [batch for batch in self._batches if len(batch)]
        self._waiting = deque(call for call in self._waiting if call)

    def _tell(self, finished: Finished) -> None:
        for member, delta in finished:
            self._hold(member.stream, delta)


def by_prompt_length(members: Sequence[OpenRequest], budget: int) -> list[list[OpenRequest]]:
    """Group requests into prefill passes: samples of a prompt share a pass, with prompts of similar length."""
    by_prompt: dict[tuple[tuple[int, ...], tuple[str, ...]], list[OpenRequest]] = {}
    for member in members:
        by_prompt.setdefault(prompt_of(member), []).append(member)
    prompts = sorted(by_prompt, key=lambda prompt: len(prompt[0]))
    chunks = by_length(range(len(prompts)), [len(tokens) for tokens, _ in prompts], budget)
    return [[member for i in chunk for member in by_prompt[prompts[i]]] for chunk in chunks]
