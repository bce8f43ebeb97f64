# SPDX-License-Identifier: Apache-2.0
"""Estimates of a rank's memory and work from the model's configuration, without its weights.

An update runs on fake tensors, which have shapes but no memory, and `LiveBytes` counts the bytes that real tensors
would take. So the estimate follows the trainer's own layouts and optimizers. A deep model runs with few layers, and the
result is extrapolated. Shards and buffers of several ranks are calculated. Models with media or experts are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from relax_core import learn
from relax_core.api import ConfigError, Estimate, Routing, TrainerSpec, Workload
from relax_core.api.plan import RESERVED
from relax_core.learn.huggingface import use_float32_head
from relax_core.trainer_kit.model_folder import FIELD, check_folder, has_towers
from relax_core.trainer_kit.offload import check_offload
from relax_core.trainer_kit.ranks import BUCKET
from relax_core.trainer_kit.setup import TRAINED_ROLES, choose_format, publish_format
from relax_plugin_torch.adapters import choose_trained
from relax_plugin_torch.blocks import blocks_of, recompute_blocks
from relax_plugin_torch.freezing import hold_frozen_in
from relax_plugin_torch.live_bytes import LiveBytes
from relax_plugin_torch.optimizer import make_optimizer
from relax_plugin_torch.options import OptimizerKind, TorchOptions
from relax_plugin_torch.policy import Flops
from relax_plugin_torch.setup import frozen_format, rounded

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

UNMASKED = "relax-unmasked-sdpa"
"""Name of the attention without masks that estimates register in transformers."""
SHALLOW = (2, 4)
"""Layers of the two shallow models from which a deeper model's trace is extrapolated."""
OF_ADAMW = {"adamw": 1.0, "sgd": 1.0, "adamw-8bit": 0.26, "adafactor": 0.02}
"""Size of an optimizer's state, divided by that of the optimizer that runs on fake tensors: SGD for sgd, else AdamW."""
COMES_AND_GOES = ("gradients", "activations", "logits")
ALLOCATOR, BUFFERS = 0.5, 20 << 20
"""Memory on a CPU in addition to tensors: the share of short-lived tensors that glibc's malloc loses to fragmentation,
and the bytes of buffers of matrix products. Measured shares (docs/benchmarks.md): 0.36 to 0.58 over five sizes."""
SCALAR = 1
"""Value of `num_labels` in the configuration of a model with a scalar head."""
BLOCKS_AT_ONCE = 2
"""Number of sharded blocks whose weights are whole at once: the next block is gathered while one computes."""

Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a micro-batch: lines, tokens in a line, trained tokens, and whether attention needs a mask."""

    lines: int
    width: int
    trained: int
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """The cost of an update or a forward pass: memory in bytes, and operations of its largest micro-batch."""

    peaks: Mapping[Hashable, Parts]
    """Memory at the peak of each moment (`Moment`)."""
    parameters: float
    optimizer: float
    flops: float
    block: float
    """Bytes of the parameters of the largest block."""
    counts: tuple[float, float]
    """Numbers of trained parameters and of all parameters."""

    @property
    def peak(self) -> Parts:
        return dict(max(self.peaks.values(), key=lambda parts: sum(parts.values())))

    def to(self, deeper: Trace, times: float) -> Trace:
        """Extrapolate linearly from this trace, by `times` the difference between this and a deeper model's trace."""

        def along(name: str) -> float:
            start: float = getattr(self, name)
            return float(start + (getattr(deeper, name) - start) * times)

        peaks = {
            moment: {
                kind: parts.get(kind, 0) + (deeper.peaks[moment].get(kind, 0) - parts.get(kind, 0)) * times
                for kind in {*parts, *deeper.peaks[moment]}
            }
            for moment, parts in self.peaks.items()
            if moment in deeper.peaks
        }
        trained, all_of_them = (a + (b - a) * times for a, b in zip(self.counts, deeper.counts, strict=True))
        return Trace(peaks, along("parameters"), along("optimizer"), along("flops"), self.block, (trained, all_of_them))


class Moment:
    """The present part of an update: forward, backward or the optimizer's step, of one micro-batch.

    The peak of each part is linear in the number of layers. The largest of these peaks is not, because with more layers
    another part may need most. Backward, memory changes linearly from block to block, so that it is largest at one of
    the ends: each half of a backward pass is a part.
    """

    def __init__(self, trained: int) -> None:
        """`trained`: number of trained tensors."""
        self._half, self._gradients, self._part = trained / 2, 0, ""

    def begin(self, part: str) -> None:
        self._part, self._gradients = part, 0

    def has_gradient(self) -> None:
        """Count one more gradient of a backward pass."""
        self._gradients += 1

    def key(self) -> tuple[str, bool]:
        return self._part, self._gradients >= self._half


def estimate(
    spec: TrainerSpec, options: TorchOptions, work: Workload, micro_batches: Sequence[Sequence[int]],
    scalar: frozenset[str] = frozenset(),
) -> Estimate:  # fmt: skip
    """Estimate the memory by phase and the floating-point operations of one step.

    `micro_batches`: row indices of each micro-batch of this rank. `scalar`: outputs of a scalar head; empty without.
    Raises NotImplementedError for models with media inputs or experts.
    """
    check_offload(options.offload_optimizer, torch.device("cpu" if _on_cpu(options) else "cuda"))
    config = _config(spec, scalar)
    sizes = [len(rows) for rows in micro_batches]
    largest = max(sizes, default=0)
    shapes = [_shape(config, spec, options, work, rows) for rows in (largest, *_passes(sizes))]
    trace = _traced(config, spec, options, shapes[0], shapes[1:])
    share = sum(sizes) / max(1, largest)
    phases, notes = _phases(trace, spec, options)
    where = "train" if spec.role in TRAINED_ROLES else "forward"
    part = _part_trained(trace) if where == "train" else ()
    return Estimate(phases, {where: trace.flops * share}, (*part, *notes))


def _config(spec: TrainerSpec, scalar: frozenset[str]) -> PretrainedConfig:
    from transformers import AutoConfig

    path = str(spec.model["path"])
    try:
        config = AutoConfig.from_pretrained(check_folder(path), local_files_only=True)
        known = config.to_dict()
    except Exception as error:  # transformers raises errors of many types for a faulty configuration
        raise ConfigError(
            FIELD, path, f"transformers can't read its config.json ({error}); check the folder"
        ) from error
    if has_towers(known):
        raise NotImplementedError("models with vision or audio inputs can't be estimated yet")
    if Routing.of(known) is not None:  # the data choose the experts, and fake tensors hold no data
        raise NotImplementedError("models with experts can't be estimated yet")
    if scalar:
        config.num_labels = SCALAR
    return config


# -- layout -----------------------------------------------------------------------------------------------------------


def _passes(sizes: Sequence[int]) -> list[int]:
    """Return row counts: of the first micro-batch, and of the largest later one, which runs while gradients exist."""
    return [*sizes[:1], *([max(sizes[1:])] if sizes[1:] else [])]


def _shape(config: PretrainedConfig, spec: TrainerSpec, options: TorchOptions, work: Workload, rows: int) -> Shape:
    """Return the size of the layout that `Policy` would choose: one row per line, or one group per line."""
    plain = Shape(rows, max(1, work.row_tokens - 1), rows * work.new_tokens)
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    alone = work.group_size == 1 or rows == 1
    if not options.share_prefixes or alone or any(kind != "full_attention" for kind in kinds):
        return plain
    if options.attention not in ("auto", "sdpa"):
        return plain
    groups = -(-rows // work.group_size)
    width = work.prompt_tokens + min(rows, work.group_size) * max(0, work.new_tokens - 1)
    tree = Shape(groups, width, plain.trained, masked=True)
    return tree if Flops.of(_skeleton(config, spec, options)).favour_tree(plain, tree) else plain


# -- an update on fake tensors ----------------------------------------------------------------------------------------


def _traced(
    config: PretrainedConfig, spec: TrainerSpec, options: TorchOptions, largest: Shape, passes: Sequence[Shape]
) -> Trace:
    text = config.get_text_config()
    layers, kinds = int(text.num_hidden_layers), set(getattr(text, "layer_types", None) or ())
    if layers <= SHALLOW[1] or len(kinds) > 1 or text is not config or not _layers_alike(spec):
        return _trace(config, spec, options, largest, passes)
    fewer, more = (_trace(_cut(config, depth), spec, options, largest, passes) for depth in SHALLOW)
    return fewer.to(more, (layers - SHALLOW[0]) / (SHALLOW[1] - SHALLOW[0]))


def _layers_alike(spec: TrainerSpec) -> bool:
    """Return True unless a pattern of `freeze` or `lora` names layers by number."""
    lora = spec.model.get("lora") or {}
    patterns = (spec.model.get("freeze"), lora.get("targets"), lora.get("modules_to_save"))
    return not any(character.isdigit() for names in patterns for name in names or () for character in name)


def _cut(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if kinds := getattr(config, "layer_types", None):
        changes["layer_types"] = kinds[:layers]
    return type(config).from_dict({**config.to_dict(), **changes})


def _trace(
    config: PretrainedConfig, spec: TrainerSpec, options: TorchOptions, largest: Shape, passes: Sequence[Shape]
) -> Trace:
    vocab, trains = int(config.get_text_config().vocab_size), spec.role in TRAINED_ROLES
    worded = config.num_labels != SCALAR

    def kind_of(tensor: Tensor) -> str:
        return "logits" if worded and tensor.dim() > 1 and tensor.shape[-1] == vocab else "activations"

    skeleton = _skeleton(config, spec, options)
    moment = Moment(sum(parameter.requires_grad for parameter in skeleton.parameters()))
    live = LiveBytes(kind_of, lambda: (*moment.key(), live.now["logits"] > 0))
    with FakeTensorMode(allow_non_fake_inputs=True), live, torch.set_grad_enabled(trains):
        model = _on_fake_tensors(skeleton)
        live.belongs("parameters", [*model.parameters(), *model.buffers()])
        parameters = live.now["parameters"]
        optimizer = _stepped(model, spec, live, options.optimizer, moment) if trains else None
        held = live.now["optimizer"]
        live.restart()
        for number, shape in enumerate(passes):
            _pass(model, spec, options, shape, moment, f"micro-batch {number}")
        if optimizer is not None:
            moment.begin("update")
            optimizer.step()
        peaks: dict[Hashable, Parts] = {key: dict(parts) for key, parts in live.peaks.items()}
        with FlopCounterMode(display=False) as counter:  # after the peak is read: the counter's hooks keep tensors
            _pass(model, spec, options, largest, moment, "counted")
    held *= OF_ADAMW[options.optimizer]
    for parts in peaks.values():
        parts["optimizer"] = parts.get("optimizer", 0) * OF_ADAMW[options.optimizer]
    attention_passes = 3 + options.activation_checkpointing if trains else 1
    flops = counter.get_total_flops() + _attention(config, largest) * attention_passes
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks_of(model)]
    return Trace(peaks, parameters, held, flops, float(max(blocks, default=0)), _counts(model))


def _unmasked() -> str:
    """Register `sdpa` attention without masks, and return its name.

    With fake tensors, transformers makes a causal mask because it can't read values; real tensors get no mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)
    return UNMASKED


def _skeleton(config: PretrainedConfig, spec: TrainerSpec, options: TorchOptions) -> PreTrainedModel:
    """Return the model on the meta device with frozen parts and adapters; peft can't add adapters to fake tensors."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if config.num_labels == SCALAR else AutoModelForCausalLM
    attention = "eager" if options.attention == "eager" else _unmasked()
    with torch.device("meta"):
        made = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
        choose_trained(made, spec)
    computes = choose_format(spec.model.get("dtype", "float32"), torch.device("cpu"))
    publishes = publish_format(spec, computes)
    hold_frozen_in(made, frozen_format(publishes, computes))
    if config.num_labels != SCALAR and rounded(computes) is not None and spec.model.get("head_dtype") == "float32":
        use_float32_head(made, publishes)
    if options.activation_checkpointing:
        recompute_blocks(made)
    return made.eval()  # type: ignore[no-any-return]


def _on_fake_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the model's meta tensors by fake tensors of the active mode; tied tensors stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    fake = torch.empty_like(tensor, device="cpu")
                    whole = isinstance(tensor, torch.nn.Parameter)
                    new = torch.nn.Parameter(fake, tensor.requires_grad) if whole else fake
                    own[name] = made.setdefault(id(tensor), new)
    return model


def _stepped(
    model: PreTrainedModel, spec: TrainerSpec, live: LiveBytes, kind: OptimizerKind, moment: Moment
) -> torch.optim.Optimizer:
    """Return an optimizer after its first step, so that its state exists."""

    def counted(parameter: Tensor) -> None:
        moment.has_gradient()
        live.belongs("gradients", [parameter.grad])

    optimizer = make_optimizer(model, spec.optimizer, "sgd" if kind == "sgd" else "adamw")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    live.belongs(
        "optimizer", (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    )
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(counted)
    return optimizer


def _pass(
    model: PreTrainedModel, spec: TrainerSpec, options: TorchOptions, shape: Shape, moment: Moment, name: str
) -> None:
    """Run a micro-batch forward as `Policy` does, and backward if gradients are needed."""
    moment.begin(f"{name} forward")
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape.lines, shape.width, dtype=torch.long), "use_cache": False}
    if shape.masked:
        inputs["position_ids"] = torch.zeros(shape.lines, shape.width, dtype=torch.long)
        inputs["attention_mask"] = torch.ones(shape.lines, 1, shape.width, shape.width, dtype=torch.bool)
    low = rounded(choose_format(spec.model.get("dtype", "float32"), torch.device("cpu")))
    with torch.autocast("cpu", dtype=low, enabled=low is not None):
        hidden = model.base_model(**inputs).last_hidden_state
        features = hidden.reshape(shape.lines * shape.width, -1).index_select(
            0, torch.zeros(shape.trained, dtype=torch.long)
        )
        scored = _scored(model, spec, options, features)
    if scored.requires_grad:
        moment.begin(f"{name} backward")
        scored.sum().backward()


def _scored(model: PreTrainedModel, spec: TrainerSpec, options: TorchOptions, features: Tensor) -> Tensor:
    """Return the head's output for the body's features: a scalar or a log-prob for each trained token."""
    if model.config.num_labels == SCALAR:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(features.float(), model.score.weight.float()).squeeze(-1)
    scored = learn.score_distribution(
        features, model.get_output_embeddings(), torch.zeros(len(features), dtype=torch.long),
        learn.Wanted(measured_entropy=spec.role == "actor"),
        vocab_size=model.config.get_text_config().vocab_size, temperature=spec.temperature,
        max_logits=options.logits_mb * 2**18,
    )  # fmt: skip
    return scored["log_probs"]


def _attention(config: PretrainedConfig, shape: Shape) -> float:
    """Return the operations of attention in one forward pass; torch's counter does not count them on a CPU."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    width = heads * int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    seen = shape.width if shape.masked else shape.width / 2
    return 4.0 * int(text.num_hidden_layers) * width * shape.lines * shape.width * seen


def _counts(model: PreTrainedModel) -> tuple[float, float]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return float(sum(size for size, trained in sizes if trained)), float(sum(size for size, _ in sizes))


def _part_trained(trace: Trace) -> tuple[str, ...]:
    """Return a note with the share of trained parameters, if only a part of the model is trained."""
    trained, everything = (round(count) for count in trace.counts)
    share = 100 * trained / everything
    return (f"trains {trained:,} of {everything:,} parameters ({share:.2g} %)",) if trained < everything else ()


# -- phases -----------------------------------------------------------------------------------------------------------


def _phases(
    trace: Trace, spec: TrainerSpec, options: TorchOptions
) -> tuple[dict[str, dict[str, int]], tuple[str, ...]]:
    ranks, notes = spec.world_size, []
    peak, whole = dict(trace.peak), trace.parameters
    shared = ranks > 1 and options.sharding == "fsdp"
    if shared:
        for kind in ("parameters", "gradients", "optimizer"):
            peak[kind] = peak.get(kind, 0) / ranks
        outside = max(0.0, whole - trace.block * round(whole / trace.block)) if trace.block else whole
        peak["gathered"] = min(whole, outside + BLOCKS_AT_ONCE * trace.block) * (2 if spec.role in TRAINED_ROLES else 1)
        notes.append("sizes of sharded weights are from arithmetic, not from a trial on fake tensors")
    held = {kind: peak[kind] for kind in ("parameters", "optimizer") if peak.get(kind)}
    if _on_cpu(options):
        peak[RESERVED] = BUFFERS + ALLOCATOR * sum(peak.get(kind, 0.0) for kind in COMES_AND_GOES)
        notes.append(f"{RESERVED} is memory that malloc keeps beyond tensors (measured share); tensors are exact")
    if spec.role not in TRAINED_ROLES:
        return _rounded({"forward": peak}), tuple(notes)
    first = spec.rank == 0
    phases: dict[str, Parts] = {"train": peak, "checkpoint": {**held, "snapshot": sum(held.values())}}
    if not (shared or first):
        phases["checkpoint"] = held
    if ranks > 1 and not shared:
        phases["exchange"] = {**held, "gradients": 4 * trace.counts[0], "exchange": min(whole, 2 * BUCKET * 4)}
    if first and spec.role == "actor":
        half = 1.0 if (spec.publish_dtype or spec.model.get("dtype", "float32")) == "float32" else 0.5
        phases["publish"] = {**held, "published": whole * half, **({"gathered": whole} if shared else {})}
    if options.offload_optimizer:  # the state is on the device only for the optimizer's step and for checkpoints
        phases["update"] = {**held, "gradients": peak["gradients"]}
        for name in {"train", "publish"} & phases.keys():
            phases[name] = {kind: size for kind, size in phases[name].items() if kind != "optimizer"}
    return _rounded(phases), tuple(notes)


def _on_cpu(options: TorchOptions) -> bool:
    return options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())


def _rounded(phases: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, int]]:
    return {name: {kind: round(size) for kind, size in parts.items() if size >= 1} for name, parts in phases.items()}
