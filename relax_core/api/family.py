# SPDX-License-Identifier: Apache-2.0
"""The contract of model families, which render and parse a model's text; and `Routing`, the shape of expert routing.

Text is tokenized once: `start` renders the first prompt; `delta` renders only what later messages append.
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
"""Formats of tool calls; `auto`: the format that the model's chat template shows."""


UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The character that stands in decoded text for a character whose last bytes are not sampled yet."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered prompt: token ids, and the media that the placeholder tokens stand for."""

    tokens: tuple[int, ...]
    media: tuple[str, ...] = ()
    """References of the media (later their keys in the media store), in the order of the placeholders."""


class ModelFamily(Configurable[OptionsT], Generic[OptionsT]):
    """A family of models: its chat rendering, freezable parts and media placeholders."""

    kind: ClassVar[str] = "model-family"
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Parts that training can freeze (`vision`, `audio`, `language`, `projector`): name -> patterns of module names."""

    placeholders: Mapping[str, int] = {}
    """Kind of medium -> id of its placeholder token; set by `open`. A rendered prompt has one placeholder for each
    medium. Once the medium is processed, `expand` repeats the token. Placeholders are never sampled."""
    foreign_tokens: Mapping[int, str] = {}
    """Tokens of the tokenizer that the model's vocabulary lacks, id -> text; set by `open`. A row with such a token is
    refused. Stop tokens are never among them."""
    misread_ends: Mapping[int, str] = {}
    """End-of-sequence ids of the model, id -> text, if the tokenizer reads all of them as ordinary text, which a
    tokenizer of another model does; set by `open`."""

    @abstractmethod
    def open(self, model: Mapping[str, Any]) -> None:
        """Load the tokenizer and the chat template that the `[model]` table names."""

    @abstractmethod
    def start(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        """Return the ids of the first prompt, up to the policy's turn; a string is tokenized without a template."""

    def text(self, prompt: str | Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the first prompt as text, for display and to prove the ids; by default, the text of the ids."""
        return self.decode(self.start(prompt, tools).tokens, skip_special=False)

    @abstractmethod
    def delta(self, before: Sequence[Message], appended: Sequence[Message], last_token: int | None = None) -> Rendered:
        """Return the ids between the policy's last sampled token and its next turn.

        `before` ends with the policy's turn; `appended` follows it. `last_token` is the policy's last sampled token. If
        it ended the turn, or is None, the ids do not repeat the end-of-turn token.
        """

    def expand(self, tokens: Sequence[int], layouts: Sequence[Sequence[PlaceholderSpan]]) -> tuple[int, ...]:
        """Replace each medium's placeholder by all tokens of the medium.

        By default, each feature becomes one placeholder token. Override it for models with tokens between features.
        """
        holds, left = frozenset(self.placeholders.values()), iter(layouts)
        out: list[int] = []
        for token in tokens:
            out += [self.placeholders[s.kind] for s in next(left) for _ in range(s.size)] if token in holds else [token]
        return tuple(out)

    def parts(self, model: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        """Return the freezable parts of the model that the `[model]` table names; by default, `modules`."""
        return self.modules

    def turn(self, before: str | Sequence[Message], message: Message) -> tuple[int, ...]:
        """Return the ids of a dataset's assistant turn after the messages `before`, with the end-of-turn token."""
        if message.tool_calls:
            raise ConfigError(
                "data.train", "an assistant's turn with tool calls", f"remove it: {type(self).__name__} can't render it"
            )
        if message.extra:
            got = f"an assistant's turn with the field {next(iter(message.extra))!r}"
            raise ConfigError("data.train", got, f"remove it: {type(self).__name__} can't render it")
        return self.ended(self.encode(message.text))

    def ended(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids of a turn with the end-of-turn token at their end."""
        return ids if ids[-1:] and ids[-1] in self.stop_tokens else ids + tuple(self.stop_tokens[:1])

    @abstractmethod
    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of tokens that follow other tokens: a space at their beginning is kept."""

    @abstractmethod
    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of plain text that follows other text, without adding special tokens or a space before it.

        Only `start` begins a text; some tokenizers put a space there.
        """

    def parse(
        self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall, ...], str]:
        """Return (text, tool calls, parse error) of one turn of the policy; never raise, for any tokens.

        `tools`: the tools that the policy may call. `before`: the tokens before the turn. The returned text leaves out
        special tokens, the stop token at the end, and the tool calls that could be parsed.
        """
        return self.decode(self.without_stop(tokens)), (), ""

    def parse_beginning(self, tokens: Sequence[int], tools: Sequence[Tool] = (), before: Sequence[int] = ()) -> str:
        """Return the part of an unfinished turn's text that no later token can change; arguments as in `parse`."""
        return "" if tools else self.decode(self.without_stop(tokens)).rstrip(UNFINISHED)

    def without_stop(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return a turn's tokens without the stop token at their end, which belongs to no text."""
        return tokens[:-1] if len(tokens) and tokens[-1] in self.stop_tokens else tokens

    @property
    @abstractmethod
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the ids that end a turn, the usual one first."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...


RoutingReplayMode = Literal["off", "rollout", "recompute"]
ROUTED_COLUMNS = ("routed_experts", "routed_valid")
"""Bus columns: the experts that each token visited, and whether they are known."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_PARTS = ("thinker_config", "text_config", "llm_config")
_EVEN = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Routing:
    """The shape of a model's routing of tokens to experts, read from its `config.json`.

    Visited experts travel as bytes of consecutive positions: [positions, layers, top_k] of uint8, or of little-endian
    uint16 for more than 256 experts. Only layers with a router count, in the order of computation.
    """

    layers: int
    """Number of layers with a router."""
    top_k: int
    """Number of experts that a token visits in each layer with a router."""
    experts: int

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        return "uint8" if self.experts <= 256 else "uint16"

    @property
    def width(self) -> int:
        """Return the size of one position's experts in bytes."""
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Read the routing from the content of `config.json`; return None for a model without routers."""
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
    """Return the indices of the layers with a router, for a model with a `Routing`."""
    for part in _PARTS:
        if isinstance(config.get(part), Mapping):
            return routed_layers(config[part])
    return [layer for layer in range(config["num_hidden_layers"]) if _has_router(config, layer)]


def even_context(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of a model with `longrope` positions in tokens; None for other models.

    `config`: the content of `config.json`. A sequence beyond this number changes the positions of all rows in its batch,
    so a row's log-probs would depend on its neighbours, and engines and trainers would differ.
    """
    parts = [config, *(config[name] for name in _PARTS if isinstance(config.get(name), Mapping))]
    bounds = [
        part.get(_EVEN, rope.get(_EVEN))
        for part in parts
        for table in (part.get("rope_parameters") or part.get("rope_scaling") or {},)
        for rope in (table, *table.values())  # a table of its own for each kind of layer
        if isinstance(rope, Mapping) and rope.get("long_factor")
    ]
    return min((bound for bound in bounds if isinstance(bound, int)), default=None)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _has_router(config: Mapping[str, Any], layer: int) -> bool:
    """Return True if this layer has experts; without any of the keys below, every layer has experts."""
    if layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    kinds = config.get("mlp_layer_types")
    if kinds:
        return bool(kinds[layer] == "sparse")
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
