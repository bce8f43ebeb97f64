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
        self._of: list[str] = []
        """Requests of the batch for which `_rules`, `_seeds` and `_prompts` were made."""
        self._rules: Rules | None = None
        self._seeds = np.zeros(0, np.uint64)
        self._prompts = np.zeros(0, np.int64)

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Draw a token for each row of `logits` [rows, vocabulary]."""
        names: list[str] = self._runner.input_batch.req_ids
        if not names:  # vLLM measures its memory with an empty batch
            return super().forward(logits, *args, **kwargs)
        states = [self._runner.requests[name] for name in names]
        rules = self._rules_of(names, states, logits)
        places = self._prompts + np.array([len(state.output_token_ids) for state in states], np.int64)
        return _output(draw(logits.float(), uniforms(self._seeds, places), rules), logits.device)

    def _rules_of(self, names: list[str], states: Sequence[Any], logits: torch.Tensor) -> Rules:
        """Return the sampling rules of the batch; rebuild the rules when the batch's rows change."""
        if self._rules is None or names != self._of:
            own = [(state.sampling_params.extra_args or {}).get(RULES, SCORED) for state in states]
            choices = np.array([tuple(one["choices"]) for one in own], np.dtype(list(CHOICES)))
            self._rules = Rules.of(choices, [one["suppress"] for one in own], logits.shape[1], logits.device)
            self._seeds = np.array([one["seed"] for one in own], np.uint64)
            self._prompts = np.array([one["prompt"] for one in own], np.int64)
            self._of = list(names)
        return self._rules


def _output(drawn: Drawn, device: torch.device) -> SamplerOutput:
    """Return the drawn tokens as vLLM expects them: log-probs of the drawn token first, then of the most likely ones."""
    ids, log_probs = [drawn.tokens[:, None]], [drawn.log_probs[:, None]]
    if drawn.top_tokens is not None and drawn.top_log_probs is not None:
        ids.append(drawn.top_tokens)
        log_probs.append(drawn.top_log_probs)
    tokens = torch.from_numpy(np.concatenate(ids, 1).astype(np.int32))
    values = torch.from_numpy(np.concatenate(log_probs, 1).astype(np.float32))
    ranks = torch.ones(len(tokens), dtype=torch.int32)  # not used
    return SamplerOutput(tokens[:, :1].to(device), LogprobsTensors(tokens, values, ranks))
