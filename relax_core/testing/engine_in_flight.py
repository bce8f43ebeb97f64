# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for engines that take new weights in mid-generation. A part of `EngineSuite`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from relax_core.api.engine import Delta, Engine, GenerateRequest
from relax_core.api.weights import Version
from relax_core.testing.engine_fixture import DISK, EngineFixture, joined
from relax_core.testing.engine_truth import agrees

PROMPT = (5, 9, 33, 2, 17)
PROMPTS = (PROMPT, (7,), (60, 3), (5, 9, 33, 2, 18), tuple(range(2, 40)))
LONG = 88
"""Tokens of requests that must still run when something happens to them."""


class InFlightChecks:
    """Tests that weights change between two tokens, and that every token says which it is of."""

    @classmethod
    def make_engine(cls) -> Engine:
        raise NotImplementedError

    def needs(self, claimed: object, what: str) -> None:
        if not claimed:
            pytest.skip(f"does not claim {what}")

    @pytest.fixture
    def renewed(self, lab: EngineFixture) -> Iterator[Callable[[], str]]:
        """Loads the other folder's weights and says which; the first ones come back afterwards."""
        self.needs(lab.engine.capabilities.receives_online, "online updates")

        def renew() -> str:
            manifest = lab.publish()
            assert lab.update(manifest).fingerprint == manifest.fingerprint
            return lab.other

        yield renew
        lab.update(lab.publish(source=lab.model))

    def test_weights_may_land_in_the_middle_of_a_request(self, lab: EngineFixture, renewed: Callable[[], str]) -> None:
        self.needs(lab.engine.capabilities.in_flight_updates, "in-flight updates")
        before, requests = lab.version.step, [lab.request(prompt, LONG, seed=i) for i, prompt in enumerate(PROMPTS)]

        async def start() -> tuple[Any, list[Delta]]:
            stream = lab.engine.generate(requests)
            parts = list(await anext(stream))
            await lab.engine.pause()
            return stream, parts

        async def finish(stream: Any, parts: list[Delta]) -> list[Delta]:
            await lab.engine.resume()
            return parts + [delta async for deltas in stream for delta in deltas]

        stream, parts = lab.run(start())
        other = renewed()
        folders = {before: lab.model, lab.version.step: other}
        parts = lab.run(finish(stream, parts))
        assert {part.version for part in parts} == set(folders)
        for request in requests:
            self.each_part_is_of_its_version(request, [part for part in parts if part.id == request.id], folders)

    def test_caches_kept_over_an_update_are_told_and_never_shared(self, lab: EngineFixture) -> None:
        self.needs(lab.engine.capabilities.keeps_kv_across_versions, "caches that outlive an update")
        other = EngineFixture(self.make_engine(), lab.model, lab.other).start(
            version=Version("actor", 0, 0), kv_across_versions=True
        )
        try:
            self._keeps_its_cache(other)
        finally:
            other.stop()

    def _keeps_its_cache(self, lab: EngineFixture) -> None:
        request = lab.request(PROMPT, LONG, seed=1)

        async def run() -> list[Delta]:
            stream = lab.engine.generate([request])
            parts = list(await anext(stream))
            await lab.engine.pause()
            await lab.engine.update_weights(lab.publish(version=Version("actor", 0, 1)), DISK)
            await lab.engine.resume()
            return parts + [delta async for deltas in stream for delta in deltas]

        parts = [part for part in lab.run(run()) if part.tokens]
        assert {part.version for part in parts} == {0, 1}
        assert {part.oldest_cache for part in parts} == {0}, "its cache began under the first weights"
        so_far: tuple[int, ...] = PROMPT
        for part in parts:
            if part.version == 0:
                agrees(lab.model, so_far, part)
            so_far += part.tokens
        (again,) = lab.generate(lab.request(so_far, 9, seed=1))
        assert (again.version, again.oldest_cache) == (1, 1)
        agrees(lab.other, so_far, again)

    def each_part_is_of_its_version(
        self, request: GenerateRequest, parts: list[Delta], folders: Mapping[int, str]
    ) -> None:
        assert len(joined(parts).tokens) == LONG
        so_far = request.tokens
        for part in parts:
            assert part.oldest_cache == part.version
            agrees(folders[part.version], so_far, part)
            so_far += part.tokens
