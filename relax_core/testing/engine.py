# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of engines, which compares an engine with a plain forward of a tiny real model.

    class TestMine(EngineSuite):
        component = "my-engine"          # or the class

Engines are slow to start, so one engine serves all tests; a test that changes weights restores them. Tests of a
capability run only if the engine declares it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from relax_core.api.engine import Delta
from relax_core.api.errors import RelaxError
from relax_core.testing.engine_fixture import (
    CONTEXT,
    PROMPT,
    PROMPTS,
    TOLERANCE,
    VOCABULARY,
    EngineFixture,
    agrees,
    gather,
    log_softmax,
    plain_log_probs,
    truncated,
    until_known,
)
from relax_core.testing.engine_weights import REFUSED, WeightChecks

LONG_PROMPT = tuple((place * 7 + 3) % VOCABULARY for place in range(112))
SAMPLES = 8


class EngineSuite(WeightChecks):
    """The suite of an engine; a subclass sets `component`."""

    samples: ClassVar[int] = 2000
    """Number of one-token samples to compare with the model's distribution; lower it for engines with small batches."""
    prompts_at_once: ClassVar[int] = 100
    """Number of prompts of 100 tokens to send in one call; more than one iteration of the engine can take."""

    operation: ClassVar[str] = ""
    """Part of the name of an operation that profiles of this engine list; set it for an engine that computes with torch."""

    # Results of requests.

    def test_facts_state_vocabulary_and_context(self, lab: EngineFixture) -> None:
        assert (lab.facts["vocab_size"], lab.facts["max_context"]) == (VOCABULARY, CONTEXT)

    def test_log_probs_agree_with_a_plain_forward(self, lab: EngineFixture) -> None:
        requests = [lab.request(prompt, 9, seed=i) for i, prompt in enumerate(PROMPTS)]
        for request, got in zip(requests, lab.generate(*requests), strict=True):
            agrees(lab.model, request.tokens, got)

    def test_log_probs_are_of_the_tempered_distribution(self, lab: EngineFixture) -> None:
        request = lab.request(PROMPT, 12, temperature=0.6, seed=4)
        (got,) = lab.generate(request)
        agrees(lab.model, PROMPT, got, lambda plain: log_softmax(plain / 0.6))

    def test_log_probs_are_renormalised_after_top_k_and_top_p(self, lab: EngineFixture) -> None:
        request = lab.request(PROMPT, 12, top_k=10, top_p=0.8, seed=4)
        (got,) = lab.generate(request)
        agrees(lab.model, PROMPT, got, lambda plain: truncated(plain, 10, 0.8))

    def test_greedy_takes_the_likeliest(self, lab: EngineFixture) -> None:
        (got,) = lab.generate(lab.request(PROMPT, 12, temperature=0.0))
        plain = agrees(lab.model, PROMPT, got)
        assert got.tokens == tuple(plain[len(PROMPT) - 1 : -1].argmax(-1).tolist())

    def test_requests_of_all_kinds_share_a_batch(self, lab: EngineFixture) -> None:
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 10, "top_p": 0.8}]
        expect = [None, None, lambda p: log_softmax(p / 0.6), lambda p: truncated(p, 10, 0.8)]
        requests = [lab.request(PROMPT, 5 + i, seed=i, **kind) for i, kind in enumerate(kinds)]
        for got, how in zip(lab.generate(*requests), expect, strict=True):
            agrees(lab.model, PROMPT, got, how)

    def test_samples_of_one_prompt_are_each_right_and_differ(self, lab: EngineFixture) -> None:
        requests = [lab.request(PROMPT, 6, seed=seed) for seed in range(8)]
        results = lab.generate(*requests)
        for got in results:
            agrees(lab.model, PROMPT, got)
        assert len({got.tokens for got in results}) > 1

    def test_samples_follow_the_distribution(self, lab: EngineFixture) -> None:
        count = self.samples
        results = lab.generate(*(lab.request(PROMPT, 1, seed=seed) for seed in range(count)))
        drawn = np.bincount([got.tokens[0] for got in results], minlength=VOCABULARY) / count
        expected = np.exp(plain_log_probs(lab.model, PROMPT)[-1])
        spread = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(drawn - expected) < 6 * spread + 2 / count).all()

    def test_a_profile_ends_with_the_next_update(self, lab: EngineFixture, tmp_path: Path) -> None:
        """An engine without profiles raises NotImplementedError."""
        path = tmp_path / "profile" / "engine"
        with contextlib.suppress(NotImplementedError):
            lab.run(lab.engine.profile(str(path), 1 << 30))
            lab.generate(lab.request(PROMPT, 2))
            lab.update(lab.publish(source=lab.model))
            assert self.operation in path.with_suffix(".operations.txt").read_text()
            assert path.with_suffix(".trace.json.gz").is_file()

    def test_stop_token_ends_and_is_returned(self, lab: EngineFixture) -> None:
        (free,) = lab.generate(lab.request(PROMPT, 12, temperature=0.0))
        stop = free.tokens[3]
        (got,) = lab.generate(lab.request(PROMPT, 12, temperature=0.0, stop_tokens=(stop,)))
        assert got.finish == "stop"
        assert got.tokens == free.tokens[: free.tokens.index(stop) + 1]

    def test_length_ends_after_exactly_the_tokens_asked_for(self, lab: EngineFixture) -> None:
        requests = [lab.request(PROMPT, count, seed=count) for count in (1, 2, 33)]
        for request, got in zip(requests, lab.generate(*requests), strict=True):
            assert (len(got.tokens), got.finish) == (request.max_new_tokens, "length")

    def test_whole_context_can_be_used(self, lab: EngineFixture) -> None:
        prompt = tuple((place * 7 + 3) % VOCABULARY for place in range(CONTEXT - 9))
        (got,) = lab.generate(lab.request(prompt, 9, seed=1))
        assert len(got.tokens) == 9
        agrees(lab.model, prompt, got)

    def test_suppressed_tokens_are_never_sampled(self, lab: EngineFixture) -> None:
        suppress = tuple(range(0, VOCABULARY, 2))
        results = lab.generate(*(lab.request(PROMPT, 8, seed=s, suppress_tokens=suppress) for s in range(4)))
        assert not {token for got in results for token in got.tokens} & set(suppress)

    def test_likeliest_tokens_come_with_each_token(self, lab: EngineFixture) -> None:
        (got,) = lab.generate(lab.request(PROMPT, 4, seed=1, num_top=3))
        plain = plain_log_probs(lab.model, (*PROMPT, *got.tokens))[len(PROMPT) - 1 : -1]
        assert len(got.top) == 4
        for pairs, row in zip(got.top, plain, strict=True):
            assert [token for token, _ in pairs] == (-row).argsort(kind="stable")[:3].tolist()
            np.testing.assert_allclose([p for _, p in pairs], np.sort(row)[::-1][:3], atol=TOLERANCE)

    def test_calls_at_once_do_not_mix(self, lab: EngineFixture) -> None:
        calls = [[lab.request(prompt, 4 + i, seed=i) for prompt in PROMPTS] for i in range(4)]

        async def all_at_once() -> list[list[Delta]]:
            return await asyncio.gather(*(gather(lab.engine, call) for call in calls))

        for call, results in zip(calls, lab.run(all_at_once()), strict=True):
            for request, got in zip(call, results, strict=True):
                assert len(got.tokens) == request.max_new_tokens
                agrees(lab.model, request.tokens, got)

    def test_more_prompts_at_once_than_one_iteration_takes(self, lab: EngineFixture) -> None:
        prompts = [
            tuple((place * (number + 3)) % VOCABULARY for place in range(100)) for number in range(self.prompts_at_once)
        ]
        requests = [lab.request(prompt, 2, seed=number) for number, prompt in enumerate(prompts)]
        results = lab.generate(*requests)
        assert all(len(got.tokens) == 2 for got in results)
        for request, got in list(zip(requests, results, strict=True))[::20]:
            agrees(lab.model, request.tokens, got)

    def test_same_seed_gives_the_same_sample_in_any_batch(self, lab: EngineFixture) -> None:
        self.needs(lab.engine.capabilities.seeds, "seeds")
        (alone,) = lab.generate(lab.request(PROMPT, 10, seed=77))
        others = [lab.request(prompt, 3 + i, seed=i) for i, prompt in enumerate(PROMPTS)]
        *_, among_others = lab.generate(*others, lab.request(PROMPT, 10, seed=77))
        assert among_others.tokens == alone.tokens

    def test_a_continuation_draws_what_the_whole_would_have(self, lab: EngineFixture) -> None:
        self.needs(lab.engine.capabilities.seeds, "seeds")
        (whole,) = lab.generate(lab.request(PROMPT, 10, seed=5))
        (rest,) = lab.generate(lab.request((*PROMPT, *whole.tokens[:4]), 6, seed=5))
        assert rest.tokens == whole.tokens[4:]

    def test_score_agrees_with_a_plain_forward(self, lab: EngineFixture) -> None:
        self.needs(lab.engine.capabilities.score, "score")
        for tokens, scored in zip(PROMPTS, lab.run(lab.engine.score(PROMPTS)), strict=True):
            plain = plain_log_probs(lab.model, tokens)
            want = [0.0, *(plain[i, token] for i, token in enumerate(tokens[1:]))]
            np.testing.assert_allclose(scored, want, atol=TOLERANCE)

    # Refused requests: the whole call fails, and the engine still serves.

    @pytest.mark.parametrize("token", [-1, VOCABULARY, 1 << 40])
    def test_id_outside_of_the_vocabulary_is_refused(self, lab: EngineFixture, token: int) -> None:
        with pytest.raises(ValueError, match=str(token)):
            lab.generate(lab.request(PROMPT, 2), lab.request((3, token), 2))
        self.still_serves(lab)

    def test_request_over_the_context_is_refused(self, lab: EngineFixture) -> None:
        with pytest.raises(ValueError, match=str(CONTEXT)):
            lab.generate(lab.request(PROMPT, CONTEXT - len(PROMPT) + 1))
        self.still_serves(lab)

    def test_empty_prompt_and_no_new_tokens_are_refused(self, lab: EngineFixture) -> None:
        for request in (lab.request((), 3), lab.request(PROMPT, 0)):
            with pytest.raises(ValueError, match=request.id):
                lab.generate(request)
        self.still_serves(lab)

    def test_request_newer_than_the_weights_is_refused(self, lab: EngineFixture) -> None:
        with pytest.raises(ValueError, match="floor"):
            lab.generate(lab.request(PROMPT, 2, floor=lab.version.step + 1))

    # Running requests: abort, pause and cancellation.

    def test_abort_ends_a_request_and_keeps_its_tokens(self, lab: EngineFixture) -> None:
        async def abort_one() -> list[Delta]:
            await lab.engine.pause()
            aborted, goes_on = lab.request(PROMPT, 100, seed=1), lab.request(PROMPT, 5, seed=2)
            running = asyncio.create_task(gather(lab.engine, [aborted, goes_on]))
            await until_known(lab.engine, 2)
            await lab.engine.abort([aborted.id])
            await until_known(lab.engine, 1)
            await lab.engine.resume()
            return await running

        aborted, went_on = lab.run(abort_one())
        assert aborted.finish == "abort"
        assert len(aborted.tokens) < 100
        assert (went_on.finish, len(went_on.tokens)) == ("length", 5)

    def test_abort_of_nothing_named_ends_all(self, lab: EngineFixture) -> None:
        async def abort_all() -> list[Delta]:
            await lab.engine.pause()
            requests = [lab.request(PROMPT, 100) for _ in range(3)]
            running = asyncio.create_task(gather(lab.engine, requests))
            await until_known(lab.engine, 3)
            await lab.engine.abort([])
            await lab.engine.resume()
            return await running

        assert [got.finish for got in lab.run(abort_all())] == ["abort"] * 3
        self.still_serves(lab)

    def test_pause_holds_requests_and_resume_ends_them_alike(self, lab: EngineFixture) -> None:
        async def paused_in_between() -> Delta:
            request = lab.request(PROMPT, 40, seed=3)
            running = asyncio.create_task(gather(lab.engine, [request]))
            await until_known(lab.engine, 1, running)
            await lab.engine.pause()
            held = await lab.engine.health()
            assert running.done() or held.running + held.waiting == 1
            await lab.engine.resume()
            return (await running)[0]

        got = lab.run(paused_in_between())
        assert got.finish == "length"
        agrees(lab.model, PROMPT, got)

    def test_a_reader_that_leaves_frees_its_requests(self, lab: EngineFixture) -> None:
        async def leave() -> None:
            requests = [lab.request(PROMPT, 100) for _ in range(3)]
            running = asyncio.create_task(gather(lab.engine, requests))
            await until_known(lab.engine, 3, running)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await until_known(lab.engine, 0)

        lab.run(leave())
        self.still_serves(lab)

    # Offloading.

    @pytest.mark.parametrize("part", ["kv", "weights"])
    def test_sleep_frees_and_wake_restores(self, lab: EngineFixture, part: str) -> None:
        self.needs(part in lab.engine.capabilities.offloads, f"offload of {part}")

        async def nap() -> tuple[int, Delta]:
            running = asyncio.create_task(gather(lab.engine, [lab.request(PROMPT, 60, seed=8)]))
            await until_known(lab.engine, 1, running)
            freed = await lab.engine.offload([part])
            await lab.engine.onload([part])
            return freed, (await running)[0]

        freed, got = lab.run(nap())
        assert freed >= (4 * lab.facts["parameters"] if part == "weights" else 0)
        agrees(lab.model, PROMPT, got)

    def test_an_unknown_part_cannot_be_offloaded(self, lab: EngineFixture) -> None:
        self.needs(lab.engine.capabilities.offloads, "offload")
        with pytest.raises(REFUSED):
            lab.run(lab.engine.offload(["attention"]))
        self.still_serves(lab)

    # Stop.

    def test_a_stopped_engine_says_so_and_serves_nothing(self, second: EngineFixture) -> None:
        second.run(second.engine.stop())
        assert not second.run(second.engine.health()).ok
        with pytest.raises(RelaxError):
            second.generate(second.request(PROMPT, 2))


class PrefixChecks:
    """Tests that samples of one prompt share its cache, and that a weight update clears the cache.

    For engines that share caches of common prefixes and report `Delta.cached`. Use it together with `EngineSuite`:
    `class TestMine(PrefixChecks, EngineSuite)`.
    """

    def test_samples_of_one_prompt_compute_it_once(self, lab: EngineFixture) -> None:
        results = lab.generate(*(lab.request(LONG_PROMPT, 4, seed=seed) for seed in range(SAMPLES)))
        for got in results:
            agrees(lab.model, LONG_PROMPT, got)
        cached, prompt = counted(results)
        assert prompt == SAMPLES * len(LONG_PROMPT)
        assert cached >= 0.8 * (SAMPLES - 1) * len(LONG_PROMPT), (
            f"only {cached} of {prompt} prompt tokens came from the cache"
        )

    def test_samples_continue_when_the_one_before_them_is_aborted(self, lab: EngineFixture) -> None:
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
        assert counted(lab.generate(lab.request(LONG_PROMPT, 2))) == (0, len(LONG_PROMPT))


def counted(results: Sequence[Delta]) -> tuple[int, int]:
    """Return the numbers of (prompt tokens found in the cache, prompt tokens) of finished requests."""
    counts = [got.cached for got in results if got.cached is not None]
    assert len(counts) == len(results), "no count of cached tokens (Delta.cached)"
    return sum(cached for cached, _ in counts), sum(prompt for _, prompt in counts)
