# SPDX-License-Identifier: Apache-2.0
"""Model families: all that knows how a model writes its text; and the routing of a mixture of experts.

Text is tokenized once: `start` renders the first prompt, `delta` renders only what a later turn appends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self

from relax_core.api.component import Configurable, OptionsT
from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.modality import PlaceholderSpan
from relax_core.api.task import Message, ToolCall

ToolCallFormat = Literal[
    "auto", "hermes", "qwen3-coder", "llama", "mistral", "deepseek", "glm", "pythonic", "kimi", "phi", "harmony"
]
"""Formats in which families of models write tool calls; `auto`: the one that the chat template shows."""


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Text of a character whose last bytes are not sampled yet."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids with the media they hold place for."""

    tokens: tuple[int, ...]
    media: tuple[str, ...] = ()


class ModelFamily(Configurable[OptionsT], Generic[OptionsT]):
    """Chat rendering, freezable parts and placeholders of one family of models."""

    kind: ClassVar[str] = "model-family"
    model_types: ClassVar[tuple[str, ...]] = ()
    """`model_type` of the Hugging Face configurations it serves; empty: any."""
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Freezable parts: name -> module patterns (`vision`, `audio`, `language`, `projector`)."""

    placeholders: Mapping[str, int] = {}
    """By kind of medium, the id of the tokens that hold its place; known once it is open. A rendered prompt has one of
    them for each medium; as many as the medium takes are put there once it is processed. They are never sampled."""

    @abstractmethod
    def open(self, model: Mapping[str, Any]) -> None:
        """Load tokenizer and template of the `[model]` table."""

    @abstractmethod
    def start(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        """Ids of the first prompt, up to where the policy speaks. A string goes in as it stands."""

    @abstractmethod
    def delta(self, before: Sequence[Message], appended: Sequence[Message], last_token: int | None = None) -> Rendered:
        """Ids that the template puts between the policy's last sampled token and its next turn.

        `before` ends with the policy's turn. An end-of-turn token is not repeated where `last_token`, the policy's
        last sampled one, already ended the turn; None: it did.
        """

    def expand(self, tokens: Sequence[int], layouts: Sequence[Sequence[PlaceholderSpan]]) -> tuple[int, ...]:
        """Tokens as a template wrote them, with what each medium takes for its one placeholder: here, for each of its
        features the token of its kind. A family whose models read more than that between them says so."""
        holds, left = frozenset(self.placeholders.values()), iter(layouts)
        out: list[int] = []
        for token in tokens:
            out += [self.placeholders[s.kind] for s in next(left) for _ in range(s.size)] if token in holds else [token]
        return tuple(out)

    def parts(self, model: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """As `modules`, for the model of this `[model]` table where they differ between models."""
        return self.modules

    def turn(self, before: str | Sequence[Message], message: Message) -> tuple[int, ...]:
        """Ids of a policy's turn that was written for it, its end token included; `before` is what it answers."""
        if message.tool_calls:
            raise ConfigError("data.train", "an assistant's turn with tool calls", f"{type(self).__name__} writes none")
        ids = self.encode(message.text)
        return ids if ids[-1:] and ids[-1] in self.stop_tokens else ids + tuple(self.stop_tokens[:1])

    @abstractmethod
    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str: ...

    @abstractmethod
    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, without special tokens added."""

    def parse(
        self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall, ...], str]:
        """(text, tool calls, parse error) of one turn of the policy, which may call `tools`; `before`: the tokens that it
        answers. The text has no special tokens, and no calls where they could be read. Raises nothing, whatever was sampled."""
        return self.decode(tokens), (), ""

    def parse_beginning(self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()) -> str:
        """Text of a turn that is still being sampled, as far as the text of the whole turn is sure to begin with it;
        `before`: the tokens that it answers."""
        return "" if tools else self.decode(tokens).rstrip(UNFINISHED)

    @property
    @abstractmethod
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a turn."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...


RoutingReplay = Literal["off", "rollout", "recompute"]
ROUTES = ("routed_experts", "routed_valid")
"""Columns of the bus: the choices of every token, and for which tokens they are known."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_PARTS = ("thinker_config", "text_config", "llm_config")


@dataclass(frozen=True, slots=True)
class Routing:
    """The shape of one model's routing of tokens to experts, read from its `config.json`.

    Choices travel as bytes: of consecutive positions, [positions, layers, top_k] of uint8, or of uint16 (little-endian)
    where there are more than 256 experts. Layers are those that have a router, in the order in which they compute.
    """

    layers: int
    """Those that have a router."""
    top_k: int
    """Experts that a token visits in each."""
    experts: int

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        return "uint8" if self.experts <= 256 else "uint16"

    @property
    def width(self) -> int:
        """Bytes of one position."""
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """From `config.json` as plain data; None of a model without routers."""
        for part in _PARTS:
            if isinstance(config.get(part), Mapping):
                return cls.of(config[part])
        experts, top_k = _first(config, _EXPERTS), _first(config, _TOP_K)
        total = config.get("num_hidden_layers")
        if experts < 2 or top_k < 1 or not isinstance(total, int):
            return None
        layers = len(routed_layers(config))
        return cls(layers, top_k, experts) if layers else None


def routed_layers(config: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers that have a router, of a model that `Routing.of` knows."""
    for part in _PARTS:
        if isinstance(config.get(part), Mapping):
            return routed_layers(config[part])
    return [layer for layer in range(config["num_hidden_layers"]) if _routes(config, layer)]


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _routes(config: Mapping[str, Any], layer: int) -> bool:
    """Tell whether this layer has experts: families say so in one of three ways, and else all have."""
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    kinds = config.get("mlp_layer_types")
    if kinds:
        return bool(kinds[layer] == "sparse")
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
