# SPDX-License-Identifier: Apache-2.0
"""Code for Hugging Face models that engines and trainers share: media inputs, routers, heads, and tensors by published name.

Engines and trainers compute a model's inputs with this code, so that their log-probs agree. This module does not load
models: its callers pass them in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from relax_core.api.errors import ConfigError
from relax_core.api.family import Routing
from relax_core.api.modality import ProcessedMedia
from relax_core.media.store import tensors_of

_ASKED = {
    "image_grid_thw": "image_grid_thw", "video_grid_thw": "video_grid_thw", "second_per_grids": "video_second_per_grid",
}  # fmt: skip
"""Tensors of processed media by the argument of `get_rope_index` that takes them."""


KINDS = ("image", "video", "audio")
"""Kinds of media in the order of their numbers in `mm_token_type_ids`, which start at 1."""
INPUTS = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "video_second_per_grid", "input_features",
    "feature_attention_mask",
)  # fmt: skip
"""Names of processed media's tensors that are inputs of models; the remaining tensors serve to render prompts."""


def use_float32_head(model: Any, rounds_to: torch.dtype | None = None) -> None:
    """Make the language head of a model compute logits in float32, also under autocast.

    Products of two 16-bit numbers are exact in float32, so the logits differ from exact ones only by the rounding of
    their sums. `rounds_to`: number format to which the weights are rounded before the product, as engines hold them;
    the gradient is not rounded. Raises ConfigError for a head that is not a linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        fix = f"the head of {type(model).__name__} is {type(head).__name__}, not torch.nn.Linear: leave this key out"
        raise ConfigError("model.head_dtype", "float32", fix)
    head.__class__ = _Float32Linear  # the module stays the same object, and copies of it compute with their own weights
    cast(_Float32Linear, head).rounds_to = rounds_to


class _Float32Linear(nn.Linear):
    """A linear layer that computes in float32; `rounds_to`: format to which its weights are rounded first."""

    rounds_to: torch.dtype | None

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            bias = None if self.bias is None else float32_rounded(self.bias, self.rounds_to)
            return nn.functional.linear(features.float(), float32_rounded(self.weight, self.rounds_to), bias)


def float32_rounded(tensor: Tensor, rounds_to: torch.dtype | None) -> Tensor:
    """Return a tensor as float32, rounded to a number format if one is given; the gradient passes unchanged."""
    rounded: Tensor = tensor.float() if rounds_to is None else _Rounded.apply(tensor, rounds_to)  # type: ignore[no-untyped-call]
    return rounded


class _Rounded(torch.autograd.Function):
    """A tensor rounded to a number format, as float32; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class MediaInputs:
    """The inputs of a model in addition to token ids: tensors of media, and positions computed by the model itself.

    Models differ in the arguments of `get_rope_index` and in the inputs on which it fails. So it is called for one
    medium at a time, with the text before the medium. Marks that open no medium are passed as text.
    """

    def __init__(self, module: Any) -> None:
        config = module.config
        named = {kind: getattr(config, f"{kind}_token_id", None) for kind in KINDS}
        self.holds = {kind: int(number) for kind, number in named.items() if number is not None}
        """Placeholder tokens by kind of medium."""
        self._takes = frozenset(inspect.signature(module.forward).parameters)
        self._compute = getattr(module.base_model, "get_rope_index", None)
        self._asks = frozenset(inspect.signature(self._compute).parameters) if self._compute else frozenset()
        self._places = torch.tensor(sorted(self.holds.values()), dtype=torch.long)
        marks = [getattr(config, f"{mark}_start_token_id", None) for mark in ("vision", "audio")]
        self._vision, self._audio = (-1 if mark is None else int(mark) for mark in marks)
        special = {*self.holds.values(), self._vision, self._audio}
        self._text = next(number for number in range(len(special) + 1) if number not in special)
        """A token that is neither a placeholder nor a mark."""

    def of(
        self, ids: Tensor, valid: Tensor, shown: Sequence[Sequence[ProcessedMedia]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the model's inputs in addition to `ids` [rows, width], by name, and each row's offset [rows].

        A row's offset is the position of the token after the row, minus the row's length. `valid` [rows, width] is True
        for tokens that are not padding. `shown`: media of each row.
        """
        media = [one for row in shown for one in row]
        inputs = {
            name: torch.from_numpy(value).to(ids.device) for name, value in tensors_of(media).items() if name in INPUTS
        }
        inputs["mm_token_type_ids"] = self._types(ids)
        positions, ahead = self._positions(ids, valid, shown)
        taken = {name: value for name, value in inputs.items() if name in self._takes}
        return taken if positions is None else {**taken, "position_ids": positions}, ahead

    def _types(self, ids: Tensor) -> Tensor:
        """Return each token's kind of medium as a number, 0 for text."""
        types = torch.zeros_like(ids)
        for number, kind in enumerate(KINDS, 1):
            if kind in self.holds:
                types[ids == self.holds[kind]] = number
        return types

    def _positions(
        self, ids: Tensor, valid: Tensor, shown: Sequence[Sequence[ProcessedMedia]]
    ) -> tuple[Tensor | None, Tensor]:
        """Return positions [3, rows, width] (None if these are only token indices) and each row's offset [rows]."""
        ahead = torch.zeros(len(ids), dtype=torch.float64)
        if self._compute is None:
            return None, ahead
        tokens, real = ids.cpu(), valid.bool().cpu()
        rows = [self._row(row[own], media) for row, own, media in zip(tokens, real, shown, strict=True)]
        positions = torch.zeros(3, *ids.shape, dtype=torch.float64)
        for number, row in enumerate(rows):
            positions[:, number, real[number]] = row[:, :-1]
            ahead[number] = row[0, -1] - (row.shape[1] - 1)
        whole = bool((positions == positions.round()).all())  # some models give videos fractional positions
        return (positions.long() if whole else positions.float()).to(ids.device), ahead.to(ids.device)

    def _row(self, tokens: Tensor, media: Sequence[ProcessedMedia]) -> Tensor:
        """Return the positions of a row, [3, tokens + 1]; the last position is that of the token after the row."""
        places = torch.isin(tokens, self._places).nonzero().squeeze(1)
        ends = np.cumsum([one.num_placeholders for one in media], dtype=np.int64)
        if len(ends) and ends[-1] > len(places):
            raise ValueError(f"{len(places)} placeholders for {ends[-1]} features")
        parts: list[Tensor] = []
        at, following = 0, torch.zeros((), dtype=torch.float64)
        for one, end in zip(media, ends, strict=True):
            behind = int(places[end - 1]) + 1
            part = self._piece(tokens[at:behind], one) + following
            parts.append(part[:, :-1])
            at, following = behind, part[0, -1]
        rest = torch.arange(len(tokens) - at + 1) + following
        return torch.cat([*parts, rest.expand(3, -1)], dim=1)

    def _piece(self, tokens: Tensor, media: ProcessedMedia) -> Tensor:
        """Return the positions [3, tokens + 1] of a text that ends with a medium, and of the token after the medium."""
        # Replace marks that open no medium by text, because a policy may sample such marks. Append two tokens of text,
        # because models expect one or two marks after a medium.
        following = torch.cat([tokens[1:], torch.tensor([self._text])])
        holds = torch.isin(following, self._places)
        audio = (tokens == self._audio) & holds
        opens = audio | (tokens == self._vision) & (holds | torch.cat([audio[1:], torch.tensor([False])]))
        marks = (tokens == self._vision) | (tokens == self._audio)
        ids = torch.cat([tokens.masked_fill(marks & ~opens, self._text), torch.full((2,), self._text)])[None]
        asked: dict[str, Any] = {
            name: torch.from_numpy(np.array(media.tensors[own])) for name, own in _ASKED.items() if own in media.tensors
        }
        if "feature_attention_mask" in media.tensors:
            asked["audio_seqlens"] = torch.from_numpy(media.tensors["feature_attention_mask"].sum(-1))
        asked["use_audio_in_video"] = {span.kind for span in media.layout} == {"video", "audio"}
        asked["mm_token_type_ids"] = self._types(ids)
        taken = {name: value for name, value in asked.items() if name in self._asks}
        positions: Tensor = self._compute(ids, attention_mask=torch.ones_like(ids), **taken)[0]  # type: ignore[misc]
        return positions[:, 0, :-1].double()


def conserved(tokens: Any, media: Sequence[ProcessedMedia], holds: Mapping[str, int]) -> str:
    """Return why tokens and media do not match; empty if they match. Raises ValueError for a medium without a layout.

    They match if each kind has as many placeholders as features, in the pieces of the media's layouts. Adjacent pieces
    of one medium and kind may be joined, as some model families do.
    """
    if missing := next((one for one in media if not one.layout), None):
        raise ValueError(f"medium {missing.key} has no layout: store the result of `laid_out`")
    found = _runs(np.asarray(tokens), holds)
    laid: list[list[tuple[str, int]]] = [[(span.kind, span.size) for span in one.layout] for one in media]
    if _fit(found, laid):
        return ""
    expected = [span for spans in laid for span in spans]
    for kind in KINDS:
        places, features = (sum(count for own, count in pieces if own == kind) for pieces in (found, expected))
        if places != features:
            return f"{places} {kind} placeholders for {features} features of {len(media)} media"
    return f"placeholders in pieces of {_listed(found)} for media in pieces of {_listed(expected)}"


def places_of(tokens: Any, media: Sequence[ProcessedMedia], holds: Mapping[str, int]) -> list[np.ndarray]:
    """Return the places of each medium's placeholders in `tokens`. Raises ValueError if tokens and media do not match."""
    if fault := conserved(tokens, media, holds):
        raise ValueError(f"a prompt of {len(tokens)} tokens: {fault}")
    places = np.flatnonzero(np.isin(np.asarray(tokens), list(holds.values())))
    ends = np.cumsum([one.num_placeholders for one in media])
    return [places[end - one.num_placeholders : end] for one, end in zip(media, ends, strict=True)]


def _fit(found: Sequence[tuple[str, int]], laid: Sequence[list[tuple[str, int]]]) -> bool:
    left = list(found)
    for spans in laid:
        joined = [(kind, sum(count for _, count in same)) for kind, same in groupby(spans, key=lambda span: span[0])]
        own = next((own for own in (spans, joined) if left[: len(own)] == own), None)
        if own is None:
            return False
        del left[: len(own)]
    return not left


def _runs(tokens: np.ndarray, holds: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return runs of consecutive placeholders of one kind, as (kind, length)."""
    kind_of = {number: kind for kind, number in holds.items()}
    at = np.flatnonzero(np.isin(tokens, list(kind_of)))
    if not len(at):
        return []
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(tokens[at]) != 0)) + 1
    return [(kind_of[int(tokens[run[0]])], len(run)) for run in np.split(at, breaks)]


def _listed(pieces: Sequence[tuple[str, int]]) -> str:
    shown = ", ".join(f"{count} {kind}" for kind, count in pieces[:6])
    return shown if len(pieces) <= 6 else f"{shown}, ... ({len(pieces)} in all)"


FIELD = "model.routing_replay"
_KIND = "TopKRouter"
"""Suffix of the names of router classes in transformers."""
_TRIED = 5


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model, in the order in which they compute."""
    return [module for module in model.modules() if type(module).__name__.endswith(_KIND)]


def routing_of(model: nn.Module) -> Routing | None:
    """Return the routing of a loaded model; None if its number of routers is 0 or differs from its configuration."""
    found = routers_of(model)
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    routing = Routing.of(config)
    return routing if found and routing is not None and routing.layers == len(found) else None


class RouterRecorder:
    """A recorder of the experts that a model's routers choose while `on` is set; `take` returns and clears them."""

    def __init__(self, model: nn.Module, routing: Routing) -> None:
        self.routing, self.on = routing, False
        self._dtype = torch.uint8 if routing.dtype == "uint8" else torch.int16
        self._chosen: list[Tensor] = []
        for router in routers_of(model):
            router.register_forward_hook(self._see)

    def _see(self, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.on:
            self._chosen.append(output[2])

    def take(self) -> np.ndarray:
        """Return the experts chosen since the last call, [positions, layers, top_k]."""
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, dim=1).to(self._dtype).cpu().numpy().view(self.routing.dtype)


class RouterReplay:
    """Replay of the experts that `tell` sets in a model's routers, also when the backward pass recomputes a layer.

    The router still computes its logits, so that its gate gets a gradient. Only the choice of experts is replayed
    (https://arxiv.org/abs/2510.11370); their weights come from the softmax of the logits. Routers of transformers that
    return (logits, weights, experts) are supported. A router that weighs experts in another way is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        routing = routing_of(model)
        if routing is None:
            raise ConfigError(FIELD, "a model", "routers of this model can't be replayed: leave the option out")
        self.routing = routing
        for kind in {type(router): router for router in self._routers}.values():
            _try(kind)
        self._planned: Tensor | None = None
        self._known: Tensor | None = None
        self._own: list[Tensor | None] = [None] * len(self._routers)
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._replay, layer))

    def tell(self, planned: Tensor | None = None, known: Tensor | None = None) -> None:
        """Set the experts to replay, `planned` [positions, layers, top_k]; None replays nothing.

        `known` [positions] is True for positions to replay; None replays all positions.
        """
        self._planned = None if planned is None else planned.transpose(0, 1).long().contiguous()
        self._known = None if known is None or planned is None else known[:, None]
        self._own = [None] * len(self._routers)

    def _replay(
        self, layer: int, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, own = output
        if self._own[layer] is None:  # later calls recompute the layer for the backward pass
            self._own[layer] = own.detach()
        if self._planned is None:
            return None
        chosen = self._planned[layer]
        if self._known is not None:
            chosen = torch.where(self._known, chosen, own)
        return logits, weigh(router, logits, chosen).to(weights.dtype), chosen

    def own(self) -> Tensor:
        """Return the experts that the present model itself chose since `tell`: [positions, layers, top_k]."""
        return torch.stack([chosen for chosen in self._own if chosen is not None], dim=1)

    def differs(self) -> Tensor:
        """Mark the positions at which the present model's own experts differ from the planned ones in some layer."""
        if self._planned is None:
            raise ValueError("nothing is replayed; call `tell` with planned experts")
        planned = self._planned.transpose(0, 1).sort(-1).values
        return (self.own().sort(-1).values != planned).flatten(1).any(1)


def weigh(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Weigh chosen experts [positions, top_k] under these logits.

    Weights are normalised unless the router's `norm_topk_prob` is False; all routers without this attribute normalise.
    """
    weights = logits.float().softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


@torch.no_grad()
def _try(router: nn.Module) -> None:
    """Raise ConfigError unless replaying the experts that a router chose gives the router's weights, bit for bit."""
    name = type(router).__name__
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ConfigError(FIELD, name, "this kind of router can't be replayed: leave the option out")
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TRIED, weight.shape[1], generator=made).to(weight.device, weight.dtype)
    try:
        logits, weights, chosen = router.forward(hidden)
        same = torch.equal(weigh(router, logits, chosen).to(weights.dtype), weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(FIELD, name, f"this router can't be replayed ({error}): leave the option out") from error
    if not same:
        raise ConfigError(FIELD, name, "this kind of router weighs its experts in another way: leave the option out")


Tensors: TypeAlias = Mapping[str, Tensor]
Revert: TypeAlias = Callable[[dict[str, Tensor]], Tensors]
"""A function that converts the tensors of a model to those of its folder."""
_LAYER = re.compile(r"\.(\d+)\.")


class PublishedPart(NamedTuple):
    """A tensor of a model folder as a strided part of the model's tensor `source`; `start`, `steps` count elements."""

    source: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def of(self, tensors: Tensors) -> Tensor:
        own = tensors[self.source]
        return own.as_strided(self.shape, self.steps, own.storage_offset() + self.start)


def parts_of(own: Tensors, revert: Revert) -> dict[str, PublishedPart]:
    """Return the tensors of the model's folder that are only parts of the model's tensors, by name.

    Writing to such a part loads it into the model. Raises ConfigError for a folder's tensor that the model lacks.

    Models fuse tensors that folders keep separate: a layer's experts are one tensor in a model, and two or three
    tensors each in a folder. To find the parts, the model's own conversion is applied to element indices in place of
    weights, once for each kind of tensor, because layers are alike.
    """
    named = revert({name: tensor.to("meta") for name, tensor in own.items()})
    kept = {name for name, tensor in own.items() if name in named and named[name].shape == tensor.shape}
    found: dict[str, PublishedPart] = {}
    known: dict[tuple[str, torch.Size], list[tuple[str, PublishedPart]]] = {}
    for name, tensor in own.items():
        if name in kept:
            continue
        layer = _LAYER.search(name)
        number = layer[1] if layer else ""
        kind = (_LAYER.sub(".#.", name, count=1), tensor.shape)
        if kind not in known:
            places = torch.arange(tensor.numel(), dtype=torch.int32 if tensor.numel() < 2**31 else torch.int64)
            parts = {to: _part(name, to, at) for to, at in revert({name: places.view(tensor.shape)}).items()}
            known[kind] = [(to.replace(f".{number}.", ".#.", 1) if number else to, part) for to, part in parts.items()]
        found |= {to.replace("#", number): part._replace(source=name) for to, part in known[kind]}
    if lacking := sorted(named.keys() - kept - found.keys()):
        raise ConfigError("model.path", lacking[0], "this tensor has no place in the model: choose another model")
    return found


def _part(source: str, to: str, places: Tensor) -> PublishedPart:
    """Return the part of `source` with the elements at `places`. Raises ConfigError unless these are evenly spaced."""
    start = int(places.flatten()[0])
    steps = tuple(
        int(places.select(axis, 1).flatten()[0]) - start if size > 1 else 1 for axis, size in enumerate(places.shape)
    )
    spaced = torch.tensor(start, dtype=places.dtype)
    for axis, (size, step) in enumerate(zip(places.shape, steps, strict=True)):
        along = torch.arange(size, dtype=places.dtype) * step
        spaced = spaced + along.view(-1, *[1] * (places.dim() - axis - 1))
    if not torch.equal(spaced.expand(places.shape), places):
        raise ConfigError("model.path", to, f"this tensor is not evenly spaced in {source}: choose another model")
    return PublishedPart(source, start, tuple(places.shape), steps)
