# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models as engines and trainers share them: media inputs, routers, and tensors under their folder's names.

An engine samples from and a trainer computes with the same thing here, so that their log-probs agree. Nothing here loads a
model; whoever has loaded one passes it in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

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
"""Arguments of `get_rope_index` and the tensors of processed media that they take."""


KINDS = ("image", "video", "audio")
"""In the order of their numbers in `mm_token_type_ids`, from 1."""
INPUTS = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "video_second_per_grid", "input_features",
    "feature_attention_mask",
)  # fmt: skip
"""Tensors of processed media that models have inputs for; others are for those who render."""


class MediaInputs:
    """Inputs of one model beside tokens: tensors of media, and positions as the model itself computes them.

    Models differ in what `get_rope_index` asks for and stumbles over. Each is asked about one medium at a time, with the text
    before it; whatever a policy may have written (a mark that opens nothing, say) is text.
    """

    def __init__(self, module: Any) -> None:
        config = module.config
        named = {kind: getattr(config, f"{kind}_token_id", None) for kind in KINDS}
        self.holds = {kind: int(number) for kind, number in named.items() if number is not None}
        """By kind of medium, the token that holds its place."""
        self._takes = frozenset(inspect.signature(module.forward).parameters)
        self._compute = getattr(module.base_model, "get_rope_index", None)
        self._asks = frozenset(inspect.signature(self._compute).parameters) if self._compute else frozenset()
        self._places = torch.tensor(sorted(self.holds.values()), dtype=torch.long)
        marks = [getattr(config, f"{mark}_start_token_id", None) for mark in ("vision", "audio")]
        self._vision, self._audio = (-1 if mark is None else int(mark) for mark in marks)
        special = {*self.holds.values(), self._vision, self._audio}
        self._text = next(number for number in range(len(special) + 1) if number not in special)
        """A token that means nothing here."""

    def of(
        self, ids: Tensor, valid: Tensor, shown: Sequence[Sequence[ProcessedMedia]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs beside `input_ids` [rows, width], positions among them; and how far the token after each row is ahead of
        its length [rows]. `valid` [rows, width]: what is no padding; `shown`: media of each row."""
        media = [one for row in shown for one in row]
        inputs = {
            name: torch.from_numpy(value).to(ids.device) for name, value in tensors_of(media).items() if name in INPUTS
        }
        inputs["mm_token_type_ids"] = self._types(ids)
        positions, ahead = self._positions(ids, valid, shown)
        taken = {name: value for name, value in inputs.items() if name in self._takes}
        return taken if positions is None else {**taken, "position_ids": positions}, ahead

    def _types(self, ids: Tensor) -> Tensor:
        """The number of the kind of medium at each place, 0 for text."""
        types = torch.zeros_like(ids)
        for number, kind in enumerate(KINDS, 1):
            if kind in self.holds:
                types[ids == self.holds[kind]] = number
        return types

    def _positions(
        self, ids: Tensor, valid: Tensor, shown: Sequence[Sequence[ProcessedMedia]]
    ) -> tuple[Tensor | None, Tensor]:
        """[3, rows, width], None where the model counts tokens alone; and how far the token after each row is ahead."""
        ahead = torch.zeros(len(ids), dtype=torch.float64)
        if self._compute is None:
            return None, ahead
        tokens, real = ids.cpu(), valid.bool().cpu()
        rows = [self._row(row[own], media) for row, own, media in zip(tokens, real, shown, strict=True)]
        positions = torch.zeros(3, *ids.shape, dtype=torch.float64)
        for number, row in enumerate(rows):
            positions[:, number, real[number]] = row[:, :-1]
            ahead[number] = row[0, -1] - (row.shape[1] - 1)
        whole = bool((positions == positions.round()).all())  # of some models, videos have fractions
        return (positions.long() if whole else positions.float()).to(ids.device), ahead.to(ids.device)

    def _row(self, tokens: Tensor, media: Sequence[ProcessedMedia]) -> Tensor:
        """Positions [3, tokens + 1]; the last is of the token to come."""
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
        """Positions [3, tokens + 1] of a text that ends with a medium, and of the token behind it."""
        # Two tokens of text behind it: models count on one mark there, or two.
        ids = torch.cat([self._as_text(tokens), torch.full((2,), self._text)])[None]
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

    def _as_text(self, ids: Tensor) -> Tensor:
        """Replace marks that open no medium by text: a policy may sample them."""
        following = torch.cat([ids[1:], torch.tensor([self._text])])
        holds = torch.isin(following, self._places)
        audio = (ids == self._audio) & holds
        opens = audio | (ids == self._vision) & (holds | torch.cat([audio[1:], torch.tensor([False])]))
        return ids.masked_fill(((ids == self._vision) | (ids == self._audio)) & ~opens, self._text)


def conserved(tokens: Any, media: Sequence[ProcessedMedia], holds: Mapping[str, int]) -> str:
    """Say why these tokens and media don't fit together; empty: each kind has as many placeholders as features, and they
    stand in the pieces that the media are laid out in, or with those of one medium joined, as their model's family does.
    Raises ValueError where nobody laid a medium out."""
    if missing := next((one for one in media if not one.layout), None):
        raise ValueError(f"medium {missing.key} has no layout: store it as `laid_out` makes it")
    found = _runs(np.asarray(tokens), holds)
    laid: list[list[tuple[str, int]]] = [[(span.kind, span.size) for span in one.layout] for one in media]
    if _fit(found, laid):
        return ""
    told = [span for spans in laid for span in spans]
    for kind in KINDS:
        places, features = (sum(count for own, count in pieces if own == kind) for pieces in (found, told))
        if places != features:
            return f"{places} {kind} placeholders for {features} features of {len(media)} media"
    return f"placeholders in pieces of {_listed(found)} for media in pieces of {_listed(told)}"


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
    """Placeholders that follow one another, by kind."""
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
"""Ending of the names of transformers' classes of routers."""
_TRIED = 5


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, in the order in which they compute."""
    return [module for module in model.modules() if type(module).__name__.endswith(_KIND)]


def routing_of(model: nn.Module) -> Routing | None:
    """The routing of a loaded model; None where it has no routers that can be watched."""
    found = routers_of(model)
    config = model.config.to_dict()  # type: ignore[operator,union-attr]
    told = Routing.of(config)
    return told if found and told is not None and told.layers == len(found) else None


class RouteRecorder:
    """Choices of routers from one `take` to the next, while `on`."""

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
        """Give the experts of the pass that ended, [positions, layers, top_k]."""
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, dim=1).to(self._dtype).cpu().numpy().view(self.routing.dtype)


class RouteReplay:
    """Routers that choose what they are told, from one `tell` to the next: backward and recomputation too.

    The logits stay those of the model now, so that its gate keeps its gradient; only the experts are those from before
    (https://arxiv.org/abs/2510.11370), weighed by the softmax of the logits of now over them. It knows routers of
    transformers that give (logits, weights, experts); each is tried, and one that weighs in another way is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        routing = routing_of(model)
        if routing is None:
            raise ConfigError(FIELD, "a model", "its routers are none that can be replayed: leave it out")
        self.routing = routing
        for kind in {type(router): router for router in self._routers}.values():
            _try(kind)
        self._planned: Tensor | None = None
        self._known: Tensor | None = None
        self._own: list[Tensor | None] = [None] * len(self._routers)
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._route, layer))

    def tell(self, planned: Tensor | None = None, known: Tensor | None = None) -> None:
        """Set `planned` [positions, layers, top_k], for positions where `known` [positions]; None: all, or nothing planned."""
        self._planned = None if planned is None else planned.transpose(0, 1).long().contiguous()
        self._known = None if known is None or planned is None else known[:, None]
        self._own = [None] * len(self._routers)

    def _route(self, layer: int, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        if self._own[layer] is None:  # else it is computed again for the backward pass
            self._own[layer] = own.detach()
        if self._planned is None:
            return None
        chosen = self._planned[layer]
        if self._known is not None:
            chosen = torch.where(self._known, chosen, own)
        return logits, weigh(router, logits, chosen).to(weights.dtype), chosen

    def own(self) -> Tensor:
        """The experts that the model of now chose since `tell`, whatever was planned: [positions, layers, top_k]."""
        return torch.stack([chosen for chosen in self._own if chosen is not None], dim=1)

    def differs(self) -> Tensor:
        """Mark positions where in some layer the model of now would have chosen other experts than those planned."""
        if self._planned is None:
            raise ValueError("nothing is replayed")
        planned = self._planned.transpose(0, 1).sort(-1).values
        return (self.own().sort(-1).values != planned).flatten(1).any(1)


def weigh(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Weigh chosen experts [positions, top_k] under these logits. Some routers do not say that they normalise, and all do."""
    weights = logits.float().softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


@torch.no_grad()
def _try(router: nn.Module) -> None:
    """Refuse a router whose own choice replayed is not its own weights, bit for bit."""
    name = type(router).__name__
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ConfigError(FIELD, name, "this kind of router can't be replayed: leave it out")
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TRIED, weight.shape[1], generator=made).to(weight.device, weight.dtype)
    try:
        logits, weights, chosen = router.forward(hidden)
        same = torch.equal(weigh(router, logits, chosen).to(weights.dtype), weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(FIELD, name, f"this kind of router can't be replayed ({error}): leave it out") from error
    if not same:
        raise ConfigError(FIELD, name, "this kind of router weighs its experts in another way: leave it out")


Tensors: TypeAlias = Mapping[str, Tensor]
Revert: TypeAlias = Callable[[dict[str, Tensor]], Tensors]
"""Converts the tensors of a model to those of its folder."""
_LAYER = re.compile(r"\.(\d+)\.")


class PublishedPart(NamedTuple):
    """The place of a named tensor in the memory of another."""

    source: str
    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def of(self, tensors: Tensors) -> Tensor:
        own = tensors[self.source]
        return own.as_strided(self.shape, self.steps, own.storage_offset() + self.start)


def parts_of(own: Tensors, revert: Revert) -> dict[str, PublishedPart]:
    """Every tensor of the folder that is not one of the model's own, as a view of the same memory, so that what is written
    there is loaded. ConfigError where one is a part of none.

    Models fuse what folders hold apart: the experts of a layer are one tensor, and a folder has two or three for each. Which
    part a name means is found by sending positions in place of weights through the model's own conversion, once for each
    kind of tensor, since layers are alike.
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
        raise ConfigError("model.path", lacking[0], "no part of the model is this tensor of its folder: choose another")
    return found


def _part(source: str, to: str, places: Tensor) -> PublishedPart:
    """Read a part from the positions of its elements in the whole. ConfigError where these are not evenly spaced."""
    start = int(places.flatten()[0])
    steps = tuple(
        int(places.select(axis, 1).flatten()[0]) - start if size > 1 else 1 for axis, size in enumerate(places.shape)
    )
    spaced = torch.tensor(start, dtype=places.dtype)
    for axis, (size, step) in enumerate(zip(places.shape, steps, strict=True)):
        along = torch.arange(size, dtype=places.dtype) * step
        spaced = spaced + along.view(-1, *[1] * (places.dim() - axis - 1))
    if not torch.equal(spaced.expand(places.shape), places):
        raise ConfigError("model.path", to, f"it is no even part of {source}: choose another model")
    return PublishedPart(source, start, tuple(places.shape), steps)
