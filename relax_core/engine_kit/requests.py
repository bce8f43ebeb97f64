# SPDX-License-Identifier: Apache-2.0
"""Checks, for authors of engines, of what a request may ask of an engine; they are made before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.api.engine import Capabilities, GenerateRequest


def check_requests(
    requests: Sequence[GenerateRequest], can: Capabilities, vocab_size: int, max_context: int, step: int
) -> None:
    """Raise ValueError naming the request, the field, what it got and the limit."""
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise ValueError(f"request {request.id!r} comes twice in one call; ids are unique")
        seen.add(request.id)
        fault = _fault(request, can, vocab_size, max_context, step)
        if fault:
            raise ValueError(f"request {request.id!r}: {fault}")


def check_ids(tokens: Sequence[int], vocab_size: int) -> str:
    """Return what is wrong with token ids; empty where nothing is."""
    if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        return f"token {bad} is outside the vocabulary of {vocab_size}"
    return ""


def _fault(request: GenerateRequest, can: Capabilities, vocab_size: int, max_context: int, step: int) -> str:
    total = len(request.tokens) + request.max_new_tokens
    if not request.tokens:
        return "no prompt tokens; give at least one"
    if request.max_new_tokens < 1:
        return f"max_new_tokens is {request.max_new_tokens}; ask for at least 1"
    if total > max_context:
        return f"{len(request.tokens)} prompt + {request.max_new_tokens} new tokens pass the context of {max_context}"
    if request.floor > step:
        return f"its floor is step {request.floor}, these weights are of step {step}; route it to a newer engine"
    ids = (*request.tokens, *request.stop_tokens, *request.suppress_tokens)
    return check_ids(ids, vocab_size) or _sampling_fault(request, vocab_size) or _unsupported(request, can)


def _sampling_fault(request: GenerateRequest, vocab_size: int) -> str:
    if not 0 <= request.temperature < float("inf"):
        return f"temperature is {request.temperature}; give 0 (greedy) or more"
    if not 0 < request.top_p <= 1:
        return f"top_p is {request.top_p}; give a number in (0, 1]"
    if not 0 <= request.top_k <= vocab_size or not 0 <= request.num_top <= vocab_size:
        return f"top_k is {request.top_k}, num_top {request.num_top}; give 0 to {vocab_size}"
    if len(set(request.suppress_tokens)) >= vocab_size:
        return "suppress_tokens leaves no token to sample"
    return ""


def _unsupported(request: GenerateRequest, can: Capabilities) -> str:
    if request.media and not can.media:
        return "media given, this engine takes text only"
    if request.routed_experts and not can.routed_experts:
        return "routed_experts asked for, this engine does not record them"
    return ""
