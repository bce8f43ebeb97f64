# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for engines that share caches of prompts that begin alike, used beside `EngineSuite`:

    class TestMine(PrefixChecks, EngineSuite): ...

They count `prompt_tokens` and `cached_tokens` in the facts of `health`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from relax_core.api.engine import Delta
from relax_core.testing.engine_fixture import VOCABULARY, EngineFixture, gather, until_known
from relax_core.testing.engine_truth import agrees

LONG_PROMPT = tuple((place * 7 + 3) % VOCABULARY for place in range(112))
SAMPLES = 8


class PrefixChecks:
    """Tests that a group's samples compute their prompt once, and that an update ends that."""

    def test_samples_of_one_prompt_compute_it_once(self, lab: EngineFixture) -> None:
        before = counted(lab)
        results = lab.generate(*(lab.request(LONG_PROMPT, 4, seed=seed) for seed in range(SAMPLES)))
        for got in results:
            agrees(lab.model, LONG_PROMPT, got)
        prompt, cached = (after - had for after, had in zip(counted(lab), before, strict=True))
        assert prompt == SAMPLES * len(LONG_PROMPT)
        assert cached >= 0.8 * (SAMPLES - 1) * len(LONG_PROMPT), f"{cached} of {prompt} prompt tokens were shared"

    def test_samples_go_on_when_the_one_before_them_is_aborted(self, lab: EngineFixture) -> None:
        requests = [lab.request(LONG_PROMPT, 4, seed=seed) for seed in range(4)]

        async def abort_first() -> list[Delta]:
            await lab.engine.pause()
            running = asyncio.create_task(gather(lab.engine, requests))
            await until_known(lab.engine, len(requests))
            await lab.engine.abort([requests[0].id, requests[2].id])
            await lab.engine.resume()
            return await running

        results = lab.run(abort_first())
        assert [got.finish for got in results] == ["abort", "length", "abort", "length"]
        for got in results[1::2]:
            agrees(lab.model, LONG_PROMPT, got)

    def test_an_update_ends_what_is_shared(self, lab: EngineFixture) -> None:
        lab.generate(lab.request(LONG_PROMPT, 2))
        lab.update(lab.publish(source=lab.model))
        before = counted(lab)
        lab.generate(lab.request(LONG_PROMPT, 2))
        assert counted(lab)[1] == before[1]


def counted(lab: EngineFixture) -> tuple[int, int]:
    """(prompt tokens, those of them that were found) so far."""
    facts: dict[str, Any] = dict(lab.run(lab.engine.health()).facts)
    return int(facts["prompt_tokens"]), int(facts["cached_tokens"])
