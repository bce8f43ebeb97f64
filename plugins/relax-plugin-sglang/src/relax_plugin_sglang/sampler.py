# SPDX-License-Identifier: Apache-2.0
"""A sampler for SGLang: each draw depends only on the request's seed and the token's position.

Log-probs are of the distribution from which the token was sampled. SGLang's own sampler returns log-probs before top_k
and top_p, and has seeds only in its deterministic mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler

from relax_core.api.engine import GenerateRequest
from relax_core.learn.logits import CHOICES, SEED_MASK, Drawn, Rules, draw, uniforms


@dataclass(slots=True)
class Row:
    """The sampler's state of one request."""

    name: str
    request: GenerateRequest | None
    """The request; None for a sequence to score, for which no tokens are drawn."""
    sent: int = 0
    """Number of tokens returned so far."""
    log_prob: float = 0.0
    """Log-prob of the newest token."""
    top: tuple[tuple[int, float], ...] = ()


class DrawingSampler(Sampler):
    """A replacement for SGLang's sampler. `reqs`: the running batch's requests in order, each with a `Row`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.reqs: list[Any] = []
        self._vocab_size = vocab_size
        self._of: tuple[int, ...] = ()
        self._rules: Rules | None = None
        self._seeds = np.zeros(0, np.uint64)

    def forward(self, logits_output: Any, sampling_info: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Draw a token for each row of `logits_output.next_token_logits` [rows, vocabulary]."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)[:, : self._vocab_size]
        rules = self._rules_of(logits.device)
        places = np.array([len(req.origin_input_ids) + len(req.output_ids) for req in self.reqs], np.int64)
        drawn = draw(logits.float(), uniforms(self._seeds, places), rules)
        self._note(drawn)
        return torch.from_numpy(drawn.tokens.astype(np.int32)).to(logits.device)

    def _rules_of(self, device: torch.device) -> Rules:
        """Return the sampling rules of the running batch; rebuild the rules when the batch's rows change."""
        of = tuple(map(id, self.reqs))
        if self._rules is None or of != self._of:
            requests = [req.row.request for req in self.reqs]
            choices = np.zeros(len(requests), np.dtype(list(CHOICES)))
            choices["temperature"] = choices["top_p"] = 1
            for place, request in enumerate(requests):
                if request is not None:
                    choices[place] = (request.temperature, request.top_p, request.top_k, request.num_top)
            suppress = [request.suppress_tokens if request is not None else () for request in requests]
            self._rules, self._of = Rules.of(choices, suppress, self._vocab_size, device), of
            seeds = [request.seed & SEED_MASK if request is not None else 0 for request in requests]
            self._seeds = np.array(seeds, np.uint64)
        return self._rules

    def _note(self, drawn: Drawn) -> None:
        for place, (req, log_prob) in enumerate(zip(self.reqs, drawn.log_probs.tolist(), strict=True)):
            row: Row = req.row
            row.log_prob = log_prob
            if drawn.top_tokens is not None and drawn.top_log_probs is not None and row.request is not None:
                pairs = zip(drawn.top_tokens[place].tolist(), drawn.top_log_probs[place].tolist(), strict=True)
                row.top = tuple(pairs)[: row.request.num_top]
