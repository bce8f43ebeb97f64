# SPDX-License-Identifier: Apache-2.0
"""Rows that decode in lockstep: one forward pass, one draw and one host synchronisation per iteration.

A row is one running request. Rows join by `merge` and leave when they finish; the batch's last rows then move into the
gaps. A row's state on the host is one record of a numpy array, so an iteration runs no Python code per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from relax_core.api.engine import Delta, FinishReason
from relax_core.engine_kit.engine_thread import OpenRequest
from relax_core.learn.logits import CHOICES, SEED_MASK, Drawn, Rules, draw, uniforms
from relax_plugin_transformers.cache import RowsCache
from relax_plugin_transformers.model import CausalModel, aligned
from relax_plugin_transformers.reservation import AHEAD

_ROW = np.dtype(
    [
        ("seed", np.uint64), ("position", np.int64), ("remaining", np.int64), ("start", np.int64), ("jump", np.float64),
        ("fresh", np.int64),
        ("oldest", np.int64),
        *CHOICES,
    ]
)  # fmt: skip
_OF_NOW = np.iinfo(np.int64).max
"""Value of the field `oldest` if the current weights computed the row's whole cache."""
_TRIM = 64
"""Minimum number of leading columns that no row uses before the cache is copied without these columns."""


Finished = list[tuple[OpenRequest, Delta]]


def prompt_of(member: OpenRequest) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return tokens and media keys of the prompt, which all its samples share."""
    return member.request.tokens, member.request.media


def slots_of(member: OpenRequest) -> int:
    return len(member.request.tokens) + member.request.max_new_tokens


class Batch:
    """Rows that share a cache and decode together."""

    def __init__(self, members: list[OpenRequest], window: int) -> None:
        self.members = members
        self._window = window
        requests = [member.request for member in members]
        self._rows = np.zeros(len(members), _ROW)
        self._rows["seed"] = [request.seed & SEED_MASK for request in requests]
        self._rows["position"] = [len(request.tokens) for request in requests]
        self._rows["remaining"] = [request.max_new_tokens for request in requests]
        self._rows["oldest"] = _OF_NOW
        for field, _ in CHOICES:
            self._rows[field] = [getattr(request, field) for request in requests]
        self._suppresses = any(request.suppress_tokens for request in requests)
        self._records_experts = any(request.routed_experts for request in requests)
        stops = [request.stop_tokens for request in requests]
        table = np.full((len(stops), max(1, *map(len, stops))), -1, np.int64)
        for row, tokens in enumerate(stops):
            table[row, : len(tokens)] = tokens
        self._stops = table
        self._tokens = np.zeros((len(members), window), np.int64)
        self._log_probs = np.zeros((len(members), window))
        self._top: dict[str, list[tuple[tuple[int, float], ...]]] = {}
        self._routed_experts: np.ndarray | None = None
        """Experts of the position before each unsent token, [rows, window, layers, top_k]; None if not requested."""
        self._prompt_experts: dict[str, np.ndarray] = {}
        """Experts of all prompt tokens but the last, by request id, until the request's first delta takes them."""
        self._history = torch.zeros(0, 0, dtype=torch.long)
        self._last = torch.zeros(0, dtype=torch.long)
        self._cache: RowsCache | None = None
        self._rules: Rules | None = None
        self._starts: torch.Tensor | None = None
        self._jumps: torch.Tensor | None = None

    @classmethod
    def prefill(cls, members: list[OpenRequest], model: CausalModel, window: int) -> Batch:
        """Run each different prompt once, share its cache among its samples, and draw their first tokens."""
        batch = cls(members, window)
        prompts = dict.fromkeys(map(prompt_of, members))
        number = {prompt: row for row, prompt in enumerate(prompts)}
        index = torch.tensor([number[prompt_of(member)] for member in members], device=model.device)
        tokens, start = aligned([tokens for tokens, _ in prompts], model.device)
        ahead = min(AHEAD, int(batch._rows["remaining"].max()))
        model.routing_recorder.watch(batch._records_experts)
        cache, logits, jumps = model.prefill(tokens, start, tokens.shape[1], [media for _, media in prompts])
        if model.routing_recorder.on:
            batch._begin_experts(model.routing_recorder.take()[index.cpu().numpy()])
        cache.pick(index, tokens.shape[1] + ahead)
        batch._cache = cache
        batch._history = tokens[index]
        batch._rows["start"], batch._rows["jump"] = start[index.cpu().numpy()], jumps[index.cpu().numpy()]
        batch._draw(logits[index], model)
        return batch

    def __len__(self) -> int:
        return len(self.members)

    @property
    def length(self) -> int:
        """Number of columns of prompts and sampled tokens, whether cached or not."""
        return self._history.shape[1]

    @property
    def slots(self) -> int:
        return sum(map(slots_of, self.members))

    @property
    def full(self) -> bool:
        """True if a row's buffer of unsent tokens is full; `flush` empties the buffer."""
        return bool((self._rows["fresh"] >= self._window).any())

    def step(self, model: CausalModel) -> None:
        """Sample one more token for every row."""
        if self._cache is None:
            model.routing_recorder.watch(False)
            media = [member.request.media for member in self.members]
            self._cache, _, _ = model.prefill(self._history, self._rows["start"], self.length + AHEAD, media)
        model.routing_recorder.watch(self._records_experts)
        dead = int(self._rows["start"].min())
        if dead >= max(_TRIM, self.length // 2):
            self._cache.shift(-dead, len(self))
            self._history = self._history[:, dead:].clone()
            self._rows["start"] -= dead
            self._changed()
        self._cache.reserve(len(self), self.length + 1, len(self))
        if self._starts is None and self._rows["start"].any():
            self._starts = torch.from_numpy(self._rows["start"].copy()).to(model.device)
        if self._jumps is None and self._rows["jump"].any():
            self._jumps = torch.from_numpy(self._rows["jump"].copy()).to(model.device)
        logits = model.forward(self._last[:, None], self._starts, self._cache, keep=1, jumps=self._jumps)
        self._history = torch.cat([self._history, self._last[:, None]], dim=1)
        if self._routed_experts is not None and model.routing_recorder.on:
            self._routed_experts[np.arange(len(self)), self._rows["fresh"]] = model.routing_recorder.take()[:, 0]
        self._draw(logits[:, -1], model)

    def _begin_experts(self, seen: np.ndarray) -> None:
        """Start recording experts. `seen`: experts of the right-aligned prompts, [rows, columns, layers, top_k]."""
        self._routed_experts = np.zeros((len(self), self._window, *seen.shape[2:]), seen.dtype)
        self._routed_experts[:, 0] = seen[:, -1]
        for row, member in enumerate(self.members):
            if member.request.routed_experts:
                self._prompt_experts[member.request.id] = seen[row, -len(member.request.tokens) : -1]

    def _new_experts(self, row: int, fresh: int) -> tuple[bytes, int]:
        """Return the experts that a delta of `fresh` tokens reports, and the first of their positions."""
        request = self.members[row].request
        if self._routed_experts is None or not request.routed_experts or not fresh:
            return b"", 0
        before = self._prompt_experts.pop(request.id, None)
        reported = self._routed_experts[row, :fresh].tobytes()
        if before is not None:
            return before.tobytes() + reported, 0
        return reported, int(self._rows["position"][row]) - int(self._rows["fresh"][row]) - 1

    def _draw(self, logits: torch.Tensor, model: CausalModel) -> None:
        if self._rules is None:
            suppress = [member.request.suppress_tokens for member in self.members] if self._suppresses else ()
            self._rules = Rules.of(self._rows, suppress, model.vocab_size, model.device)
        drawn = draw(logits, uniforms(self._rows["seed"], self._rows["position"]), self._rules)
        self._last = torch.from_numpy(drawn.tokens).to(model.device)
        at = (np.arange(len(self)), self._rows["fresh"])
        self._tokens[at], self._log_probs[at] = drawn.tokens, drawn.log_probs
        self._keep_top(drawn)
        for field, change in (("position", 1), ("remaining", -1), ("fresh", 1)):
            self._rows[field] += change

    def _keep_top(self, drawn: Drawn) -> None:
        if drawn.top_tokens is None or drawn.top_log_probs is None:
            return
        for row, member in enumerate(self.members):
            count = member.request.num_top
            if count:
                ids, log_probs = drawn.top_tokens[row, :count], drawn.top_log_probs[row, :count]
                pairs = tuple(zip(ids.tolist(), log_probs.tolist(), strict=True))
                self._top.setdefault(member.request.id, []).append(pairs)

    def take_finished(self, version: int) -> Finished:
        """Remove the rows that end with their newest token; return their requests with the last deltas."""
        last = (np.arange(len(self)), self._rows["fresh"] - 1)
        broken = ~np.isfinite(self._log_probs[last])
        stopped = (self._tokens[last][:, None] == self._stops).any(1)
        done = broken | stopped | (self._rows["remaining"] == 0)
        if not done.any():
            return []
        rows = np.flatnonzero(done)
        reasons: list[FinishReason] = ["error" if broken[row] else "stop" if stopped[row] else "length" for row in rows]
        return self._leave(rows, reasons, version)

    def take(self, rows: Sequence[int], reason: FinishReason, version: int) -> Finished:
        """Remove rows with this finish reason; return their requests with the last deltas."""
        return self._leave(np.array(rows, np.int64), [reason] * len(rows), version)

    def _leave(self, rows: np.ndarray, reasons: Sequence[FinishReason], version: int) -> Finished:
        finished = [
            (self.members[row], self._delta(row, version, reason))
            for row, reason in zip(rows.tolist(), reasons, strict=True)
        ]
        self._close_holes(rows)
        return finished

    def flush(self, version: int) -> Finished:
        """Return a delta of the unsent tokens for every row that has some."""
        fresh = [(self.members[row], self._delta(row, version)) for row in np.flatnonzero(self._rows["fresh"]).tolist()]
        self._rows["fresh"] = 0
        return fresh

    def _delta(self, row: int, version: int, finish: FinishReason = "") -> Delta:
        request_id, fresh = self.members[row].request.id, int(self._rows["fresh"][row])
        error = ""
        if finish == "error":
            fresh -= 1
            error = "the model gave no finite log-probs (weights of this version are broken or overflowed)"
        tokens, log_probs = self._tokens[row, :fresh].tolist(), self._log_probs[row, :fresh].tolist()
        top = tuple(self._top.pop(request_id, ()))[:fresh]
        oldest = min(version, int(self._rows["oldest"][row]))
        experts, first = self._new_experts(row, fresh)
        return Delta(
            request_id, tuple(tokens), tuple(log_probs), version, oldest, finish, error, experts, first, top=top
        )

    def _close_holes(self, gone: np.ndarray) -> None:
        left = len(self) - len(gone)
        stays = np.ones(len(self), bool)
        stays[gone] = False
        target = np.flatnonzero(~stays[:left])
        source = left + np.flatnonzero(stays[left:])
        for array in (self._rows, self._stops, self._tokens, self._log_probs):
            array[target] = array[source]
        if self._routed_experts is not None:
            self._routed_experts[target] = self._routed_experts[source]
            self._routed_experts = self._routed_experts[:left]
        self._rows, self._stops = self._rows[:left], self._stops[:left]
        self._tokens, self._log_probs = self._tokens[:left], self._log_probs[:left]
        for to, come in zip(target.tolist(), source.tolist(), strict=True):
            self.members[to] = self.members[come]
        del self.members[left:]
        self._move_tensors(source, target, left)
        self._changed()

    def _move_tensors(self, source: np.ndarray, target: np.ndarray, left: int) -> None:
        if len(target) and left:
            come, to = (torch.from_numpy(rows).to(self._history.device) for rows in (source, target))
            for tensor in (self._history, self._last):
                tensor[to] = tensor[come]
            if self._cache is not None:
                self._cache.move(come, to)
        self._history, self._last = self._history[:left], self._last[:left]

    def cheap_to_merge(self, other: Batch) -> bool:
        """Return True if merging with `other`, which pads the shorter batch, wastes few cells on padding."""
        mine, theirs = len(self) * self.length, len(other) * other.length
        around = (len(self) + len(other)) * max(self.length, other.length)
        return around <= 1.5 * (mine + theirs) + 4096

    def merge(self, other: Batch) -> None:
        """Take over the rows of another batch; either both batches have a cache, or neither has."""
        longer = other.length - self.length
        if longer > 0:
            if self._cache is not None:
                self._cache.shift(longer, len(self))
            self._history = torch.nn.functional.pad(self._history, (longer, 0))
            self._rows["start"] += longer
        gap = self.length - other.length
        other._rows["start"] += gap
        if self._cache is not None and other._cache is not None:
            self._cache.append(other._cache, len(self), len(other))
        self._history = torch.cat([self._history, torch.nn.functional.pad(other._history, (gap, 0))])
        self._last = torch.cat([self._last, other._last])
        width = max(self._stops.shape[1], other._stops.shape[1])
        grown = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=-1) for a in (self._stops, other._stops)]
        self._stops = np.concatenate(grown)
        self._rows = np.concatenate([self._rows, other._rows])
        self._tokens = np.concatenate([self._tokens, other._tokens])
        self._log_probs = np.concatenate([self._log_probs, other._log_probs])
        self._top.update(other._top)
        self._merge_experts(other)
        self._suppresses |= other._suppresses
        self._records_experts |= other._records_experts
        self.members = self.members + other.members
        self._changed()

    def _merge_experts(self, other: Batch) -> None:
        self._prompt_experts.update(other._prompt_experts)
        known = [experts for experts in (self._routed_experts, other._routed_experts) if experts is not None]
        if known:
            shape, dtype = known[0].shape[1:], known[0].dtype
            mine, theirs = (
                np.zeros((rows, *shape), dtype) if experts is None else experts
                for rows, experts in ((len(self), self._routed_experts), (len(other), other._routed_experts))
            )
            self._routed_experts = np.concatenate([mine, theirs])

    def drop_cache(self) -> int:
        """Drop the cache; return the bytes freed. The next step recomputes the cache."""
        freed = self._cache.size_bytes if self._cache is not None else 0
        self._cache = None
        self._rows["oldest"] = _OF_NOW
        return freed

    def outlive(self, step: int) -> None:
        """Keep the cache under newer weights, and record that weights of version `step` or older computed it."""
        if self._cache is not None:
            self._rows["oldest"] = np.minimum(self._rows["oldest"], step)

    @property
    def has_cache(self) -> bool:
        return self._cache is not None

    def _changed(self) -> None:
        self._rules = self._starts = self._jumps = None
