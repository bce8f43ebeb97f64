# SPDX-License-Identifier: Apache-2.0
"""A sampler for vLLM: each draw depends only on the request's seed and the token's position.

vLLM's own sampler draws row by row for requests with a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from relax_core.api.engine import GenerateRequest
from relax_core.learn.logits import CHOICES, SEED_MASK, Drawn, Rules, draw, uniforms

RULES = "relax"
"""Key of a request's `extra_args` with its sampling options. Scored sequences do not have it."""


def rules_of(request: GenerateRequest) -> dict[str, Any]:
    """Return the request's sampling options for `DrawingSampler`."""
    return {
        "choices": (request.temperature, request.top_p, request.top_k, request.num_top),
        "suppress": request.suppress_tokens, "seed": request.seed & SEED_MASK, "prompt": len(request.tokens),
    }  # fmt: skip


SCORED: dict[str, Any] = {"choices": (0.0, 1.0, 0, 0), "suppress": (), "seed": 0, "prompt": 0}
"""Options of a scored sequence, whose drawn token is not used."""


class DrawingSampler(Sampler):
    """A replacement for the sampler of a worker's model runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.sampler.logprobs_mode)
        self._runner = runner
        self._of: tuple[list[str], list[int]] = [], []
        """Requests of the batch, and rows of each, for which the next three were made."""
        self._rules: Rules | None = None
        self._seeds = np.zeros(0, np.uint64)
        self._prompts = np.zeros(0, np.int64)

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Draw a token for each row of `logits` [rows, vocabulary]."""
        names: list[str] = self._runner.input_batch.req_ids
        if not names:  # vLLM measures its memory with an empty batch
            return super().forward(logits, *args, **kwargs)
        drawn = self.draw(logits, [1] * len(names))
        return _output(drawn.tokens[:, None], drawn, np.arange(len(names)), logits.device)

    def draw(self, logits: torch.Tensor, counts: list[int]) -> Drawn:
        """Draw a token for each row of `logits`: `counts` rows of each request, of consecutive positions."""
        names: list[str] = self._runner.input_batch.req_ids
        states = [self._runner.requests[name] for name in names]
        rules = self._rules_of(names, states, counts, logits)
        begun = np.repeat(np.array([len(state.output_token_ids) for state in states], np.int64), counts)
        places = self._prompts + begun + _columns(counts)
        return draw(logits.float(), uniforms(self._seeds, places), rules)

    def _rules_of(self, names: list[str], states: Sequence[Any], counts: list[int], logits: torch.Tensor) -> Rules:
        """Return the sampling rules of the batch; rebuild the rules when the batch's rows change."""
        if self._rules is None or (names, counts) != self._of:
            of = [(state.sampling_params.extra_args or {}).get(RULES, SCORED) for state in states]
            own = [one for one, count in zip(of, counts, strict=True) for _ in range(count)]
            choices = np.array([tuple(one["choices"]) for one in own], np.dtype(list(CHOICES)))
            self._rules = Rules.of(choices, [one["suppress"] for one in own], logits.shape[1], logits.device)
            self._seeds = np.array([one["seed"] for one in own], np.uint64)
            self._prompts = np.array([one["prompt"] for one in own], np.int64)
            self._of = list(names), list(counts)
        return self._rules


class DraftSampler(torch.nn.Module):
    """A replacement for vLLM's rejection sampler: draws a token at each drafted position, and keeps the first tokens.

    The first token that differs from its draft is the last to be kept. So drafts change no token, and a draft is right with
    the probability that the model gives to it.
    """

    def __init__(self, sampler: DrawingSampler) -> None:
        super().__init__()
        self._sampler = sampler

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """Draw from `logits` [rows, vocabulary]: for each request as many rows as it has drafts, and one more."""
        counts = [number + 1 for number in metadata.num_draft_tokens]
        drawn = self._sampler.draw(logits, counts)
        tokens, at = kept(drawn.tokens, counts, metadata.draft_token_ids.cpu().numpy())
        return _output(tokens, drawn, at, logits.device)


def kept(drawn: np.ndarray, counts: Sequence[int], drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each request's tokens up to the first that differs from its draft, [requests, most rows], and their rows.

    `drawn` [rows]: `counts` rows of each request; `drafts`: of all rows but each request's last. Tokens that are not kept
    are -1, and their rows are 0.
    """
    columns, last = _columns(counts), np.cumsum(counts) - 1
    right = np.zeros((len(counts), max(counts)), bool)
    tokens, rows = np.full(right.shape, -1, np.int64), np.zeros(right.shape, np.int64)
    request = np.repeat(np.arange(len(counts)), counts)
    drafted = np.full(len(drawn), -1, np.int64)
    drafted[np.delete(np.arange(len(drawn)), last)] = drafts
    right[request, columns] = drawn == drafted
    tokens[request, columns], rows[request, columns] = drawn, np.arange(len(drawn))
    wrong = np.logical_or.accumulate(~right[:, :-1], axis=1)
    tokens[:, 1:][wrong], rows[:, 1:][wrong] = -1, 0
    return tokens, rows.ravel()


def _columns(counts: Sequence[int]) -> np.ndarray:
    """Return the index of each row among the rows of its request."""
    each = np.asarray(counts)
    return np.arange(each.sum()) - np.repeat(each.cumsum() - each, each)


def _output(tokens: np.ndarray, drawn: Drawn, rows: np.ndarray, device: torch.device) -> SamplerOutput:
    """Return tokens [requests, positions] as vLLM expects them, with the log-probs of the drawn rows.

    The log-prob of the drawn token comes first, then those of the most likely tokens.
    """
    ids, log_probs = [drawn.tokens[rows, None]], [drawn.log_probs[rows, None]]
    if drawn.top_tokens is not None and drawn.top_log_probs is not None:
        ids.append(drawn.top_tokens[rows])
        log_probs.append(drawn.top_log_probs[rows])
    found = torch.from_numpy(np.concatenate(ids, 1).astype(np.int32))
    values = torch.from_numpy(np.concatenate(log_probs, 1).astype(np.float32))
    ranks = torch.ones(len(found), dtype=torch.int32)  # not used
    return SamplerOutput(torch.from_numpy(tokens.astype(np.int32)).to(device), LogprobsTensors(found, values, ranks))
