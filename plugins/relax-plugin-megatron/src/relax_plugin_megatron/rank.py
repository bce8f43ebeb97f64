# SPDX-License-Identifier: Apache-2.0
"""One started rank of the trainer: its part of the decoder, its optimizer, and updates through Megatron's schedules.

The ranks of a pipeline compute the same micro-batches; the last stage computes log-probs and losses. Gradients stay in
Megatron's buffers until the update ends, and are summed over the data-parallel ranks only then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn.functional import linear

from relax_core import learn
from relax_core.api import (
    Algorithm,
    Chosen,
    Chunk,
    ConfigError,
    Manifest,
    Output,
    Ragged,
    RowBatch,
    RowId,
    TrainerSpec,
    UpdateOutcome,
    UpdateResult,
    Version,
)
from relax_core.api.weights import Payload
from relax_core.learn.packed import columns_of
from relax_core.trainer_kit.checkpoint import Snapshot, Writing, new_directory, save_checkpoint, seed_all
from relax_core.trainer_kit.chunk_rows import (
    check_lag,
    micro_batches,
    padded,
    parsed_outputs,
    scored_rows,
    trained,
    wanted,
    with_gradient,
)
from relax_core.trainer_kit.lora import FOLDER, matrix
from relax_core.trainer_kit.model_folder import FIELD, check_folder, check_rows, read_json
from relax_core.trainer_kit.offload import Offload, check_offload
from relax_core.trainer_kit.rank_trainer import StartedRank
from relax_core.trainer_kit.ranks import Ranks, backend, collective_call
from relax_core.trainer_kit.setup import (
    HEAD_OUTPUTS,
    SCALAR_HEAD,
    TRAINED_ROLES,
    check_outputs,
    check_spec,
    choose_device,
    choose_format,
    publish_format,
    scalars,
    set_up,
)
from relax_core.trainer_kit.tokenizer_files import TokenizerFiles
from relax_core.trainer_kit.update import LossScale, Progress, Update
from relax_plugin_megatron.adapters import attach, initial, keep_gradient, write as write_adapters
from relax_plugin_megatron.architecture import Architecture
from relax_plugin_megatron.checkpoint import load_checkpoint, take_snapshot
from relax_plugin_megatron.folder import FolderReader, exported_config, write_folder
from relax_plugin_megatron.freezing import frozen
from relax_plugin_megatron.lora import Lora
from relax_plugin_megatron.model import Head, features, make_chunk, transformer_config, zigzag
from relax_plugin_megatron.optimizer import WEIGHT, Optimizer
from relax_plugin_megatron.publication import Publication
from relax_plugin_megatron.routing import OUTPUT, MicroBatch, RoutingReplay
from relax_plugin_megatron.trainer import MegatronTrainer
from relax_plugin_megatron.weights import Held, Weights, count

Scores = dict[str, Tensor]
Pass = tuple[int, int, learn.PackedBatch | None]
"""One pass of a micro-batch: the chunk of layers, the number of the micro-batch, and the micro-batch."""


class Rank(StartedRank, MegatronTrainer):
    """The part of the model, the optimizer and the training progress of one rank."""

    def begin(self, spec: TrainerSpec) -> None:
        check_spec(spec, "megatron")
        options, build = self.options, self.build
        self._grid = grid = options.grid(spec.world_size)
        grid.check()
        self._path = path = str(spec.model["path"])
        self._config = read_json(check_folder(path), "config.json")
        self._shape = Architecture.of(self._config, path)
        self._shape.check(grid, options.sequence_parallel)
        self._undo_set_up = set_up(spec)
        self._device = choose_device("auto", spec.rank)
        check_offload(options.offload_optimizer, self._device)
        self._dtype = choose_format(spec.model.get("dtype", "float32"), self._device)
        self._scale = LossScale.of(self._dtype, options.loss_scale, options.loss_scale_window)
        self._files = TokenizerFiles.of(spec.model)
        self.progress = Progress()
        self._update: Update | None = None
        self._routed: list[MicroBatch | None] = []
        self._algorithm: Algorithm | None = None
        if spec.role in TRAINED_ROLES:
            self._algorithm = build(spec.algorithm)
            check_outputs(self._algorithm, spec.role)
        self._scalars = scalars(spec, build)
        if self._scalars and self._shape.encoders:
            fix = f"the {spec.role} gives scalars, for which megatron needs a model without encoders"
            raise ConfigError(FIELD, f"{path} with vision or audio", fix)
        self._frozen = frozen(spec, self._shape, bool(self._scalars))
        self._lora = Lora.of(spec, self._shape, self._frozen)
        self.ranks = Ranks(spec, self._device, options.collective_timeout_s)
        self._publishes = publish_format(spec, self._dtype)
        with self.ranks.meeting("start"):
            self._join_groups()
            self._load(path)
            self._publication = Publication(self._weights, self._publishes, build, self.ranks)
        self._writing = Writing()
        seed_all(spec.seed)

    def _join_groups(self) -> None:
        timeout = timedelta(seconds=self.options.collective_timeout_s)
        if self._spec.world_size == 1:  # Megatron needs a group even so
            store = dist.HashStore()
            dist.init_process_group(backend(self._device), store=store, rank=0, world_size=1, timeout=timeout)
        parallel_state.initialize_model_parallel(
            self._grid.tensor, self._grid.pipeline, self._grid.virtual if self._grid.virtual > 1 else None,
            context_parallel_size=self._grid.context,
            expert_model_parallel_size=self._grid.expert,
            expert_tensor_parallel_size=self._grid.expert_tensor,
            distributed_timeout_minutes=max(1, int(self.options.collective_timeout_s / 60)),
        )  # fmt: skip
        # Dropout is always 0, so the tracker of random states may do nothing.
        model_parallel_cuda_manual_seed(self._spec.seed, inference_rng_tracker=True)

    def _load(self, path: str) -> None:
        config = transformer_config(self._shape, self._grid, self.options, self._dtype)
        self._chunks = [
            make_chunk(config, self._shape, self._grid, chunk, bool(self._scalars))
            for chunk in range(self._grid.virtual)
        ]
        self._media = None
        if self._shape.encoders:
            from relax_plugin_megatron.media import RankMedia  # loads transformers

            first = self._chunks[0] if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else None
            self._media = RankMedia(path, self._spec.media, first, self._dtype, self.options.sequence_parallel)
        for chunk in self._chunks:
            if self._lora is not None:
                attach(chunk, self._shape, self._grid, self._lora, config)
            if self._lora is not None or self._frozen:
                keep_gradient(chunk)
            chunk.to(self._device)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._head: Head | None = None
        if last and not self._scalars:
            asked = self._spec.model.get("head_dtype") == "float32" and self._dtype != torch.float32
            float32 = self._publishes if asked else None
            self._head = Head(self._chunks[-1], self._shape, self._spec.suppress_tokens, float32=float32)
        self._models: list[Any] = list(self._chunks)
        self._replay = RoutingReplay.of(
            self._chunks, self._shape, self._spec, self.options.recompute == "full", self.options.sequence_parallel
        )
        self._optimizer: Optimizer | None = None
        scale = self._lora.table.scale if self._lora is not None else 0.0
        self._weights = Weights(self._chunks, self._shape, self._grid, self.ranks, scale, self._frozen)
        for chunk in self._chunks:
            chunk.requires_grad_(False)
        if self._algorithm is not None:
            for held in self._weights.trained_here:
                held.parameter.requires_grad_(True)
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self._models = [DistributedDataParallel(config, ddp, chunk) for chunk in self._chunks]
            own = [model.no_sync for model in self._models]
            config.no_sync_func = own if len(own) > 1 else own[0]
            offload = Offload(self._device) if self.options.offload_optimizer else None
            self._optimizer = Optimizer(self._models, self._spec.optimizer, self._dtype, offload)
        with FolderReader(path) as folder, self._optimizer.loaded() if self._optimizer else nullcontext():
            for name, entry in self._weights.entries.items():
                if not (name == SCALAR_HEAD and SCALAR_HEAD not in folder) and folder.shape(name) != entry.shape:
                    shapes = f"{folder.shape(name)} in its weights but {entry.shape} by its config.json"
                    raise ConfigError(FIELD, path, f"{name} is {shapes}; save the model again")
            for held in self._weights.held:
                source = held.mapped.sources[0]
                if source in self._weights.adapters:
                    continue
                if source == SCALAR_HEAD and SCALAR_HEAD not in folder:
                    self._set(held, torch.zeros(held.parameter.shape))
                else:
                    value = self._weights.read(held, folder)
                    self._set(held, value)
                    if (self._lora is not None or self._frozen) and self._publishes != self._dtype:
                        self._weights.keep(held, value)
        if self._lora is not None:
            own = {held.mapped.sources[0]: held for held in self._weights.held}
            for module, value in initial(self._lora, self._spec.seed):
                if (name := matrix(module, "A")) in own:
                    self._set(own[name], value[own[name].index(0)])

    def _set(self, held: Held, value: Tensor) -> None:
        """Set a parameter; the optimizer's float32 weights come from the value itself, not from a rounded parameter."""
        if self._optimizer is None or not held.parameter.requires_grad:
            held.parameter.data.copy_(value)
        else:
            self._optimizer.restore(held.parameter, {WEIGHT: value})

    @collective_call
    def facts(self) -> dict[str, Any]:
        return {
            "parameters": self._weights.size,
            "parameters_of_rank": sum(held.parameter.numel() for held in self._weights.held),
            "trainable": count(self._weights.trained) if self._algorithm is not None else 0,
            "max_context": self._shape.context,
            "vocab_size": self._shape.vocabulary,
            "fingerprint": self._publication.base or self._publication.fingerprint(),
            "base": self._publication.base,
            "device": str(self._device),
            "offloads": [],
            "threads": torch.get_num_threads(),
            "ranks": self.ranks.size,
            "tensor_parallel": self._grid.tensor,
            "pipeline_parallel": self._grid.pipeline,
            "expert_parallel": self._grid.expert,
        }

    # -- updates ------------------------------------------------------------------------------------------------

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        optimizer = self._trained("begin_update")
        if not self.progress.begun:
            raise ValueError("begin_update: no step was begun; call begin_step first")
        optimizer.clear_gradient()
        self._update = Update(self._algorithm, denominators, self._spec.role, self._scale.value)

    @collective_call
    def accumulate(self, chunk: Chunk, last: bool) -> None:
        update, algorithm = self._open_update(), self._algorithm
        check_lag(chunk.rows, algorithm, self._spec, self.progress.step)
        step_start = None if self.progress.updated else self.progress.step
        wanted = with_gradient(chunk.rows, algorithm, self._spec.role)

        def loss(batch: learn.PackedBatch, scores: Scores) -> Tensor:
            return update.loss(batch, scores, step_start)

        batches = self._micro_batches(chunk, wanted, wanted & trained(chunk.rows))
        self._run(batches, algorithm.outputs(), loss)
        for made in self._routed:
            if made is not None:
                update.measured(self._replay.metrics(made))

    @collective_call
    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        update, optimizer = self._open_update(), self._trained()
        update.join(self.ranks.tell(update.share(speaks=self._grid.reports(self._spec.rank))))
        factor = update.denominators.rescale(denominators)
        norm = optimizer.finish_gradient(factor / self._scale.value)
        self._update = None
        lr = self._spec.optimizer.lr * learn.lr_factor(self._spec.optimizer, self.progress.step)
        if not (np.isfinite(norm) and update.finite):
            optimizer.clear_gradient()
            lower = update.finite and self._scale.overflowed()
            return UpdateResult(UpdateOutcome.OVERFLOW if lower else UpdateOutcome.NOT_FINITE, grad_norm=norm, lr=lr)
        optimizer.advance(lr)
        self.progress.updated = True
        optimizer.clear_gradient()
        scale = {"train/loss_scale": (self._scale.value, 1.0)} if self._scale.dynamic else {}
        self._scale.applied()
        return UpdateResult(UpdateOutcome.APPLIED, {**update.metrics(factor), **scale}, norm, lr)

    def abort_update(self) -> None:
        self._update = None
        if self._optimizer is not None:
            self._optimizer.clear_gradient()

    def _open_update(self) -> Update:
        if self._update is None:
            raise ValueError("no update is open; call begin_update first")
        return self._update

    def _trained(self, call: str = "finish_update") -> Optimizer:
        """Return the optimizer; raise ValueError in a role that is not trained."""
        if self._optimizer is None:
            raise ValueError(f"{call}: role {self._spec.role} only computes forward passes")
        return self._optimizer

    def _micro_batches(self, chunk: Chunk, wanted: set[int], needed: set[int]) -> list[learn.PackedBatch | None]:
        """Return this rank's micro-batches. None stands for a micro-batch without rows for this rank.

        With expert parallel, a rank takes part in the micro-batches of the other ranks. With a virtual pipeline, the
        number of micro-batches is a multiple of the number of stages.
        """
        check_rows(chunk.rows, self._shape.vocabulary, self._shape.context)
        if self._media is not None:
            self._media.rows.check(chunk.rows)
        together = self._grid.expert > 1
        made = list(micro_batches(chunk, self._spec.rank, wanted, needed, device=str(self._device), together=together))
        return made + [None] * (-len(made) % self._grid.pipeline if self._grid.virtual > 1 else 0)

    # -- one pass through the pipeline ------------------------------------------------------------------------------

    def _run(
        self, batches: Sequence[learn.PackedBatch | None], outputs: Sequence[Output],
        loss: Callable[[learn.PackedBatch, Scores], Tensor] | None,
    ) -> list[tuple[learn.PackedBatch, Scores]]:  # fmt: skip
        """Run micro-batches forward, and backward if `loss` is given; return their scores on the last stage.

        None stands for a micro-batch in which this rank has no rows: a dummy row takes part without a gradient.
        """
        self._routed = []
        if not batches:
            return []
        scored: list[tuple[learn.PackedBatch, Scores]] = []
        context = parallel_state.get_context_parallel_group()
        multiple = self._grid.tensor if self.options.sequence_parallel else 1
        multiple *= 2 * context.size() if context.size() > 1 else 1

        def step(given: Iterator[Pass], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            part, number, own = next(given)
            batch = _dummy(str(self._device)) if own is None else own
            ids, before = padded(batch, multiple, whole="rewards" in self._scalars)
            held = zigzag(ids.shape[1], context.rank(), context.size())
            whole = torch.from_numpy(ids).to(self._device)
            tokens, given, positions = whole[:, held], {}, None
            if self._media is not None:
                shown, positions = self._media.inputs(own, whole)
                positions = positions[..., held]
                if part == 0 and parallel_state.is_pipeline_first_stage(ignore_virtual=True):
                    embedded, deep = self._media.hidden(whole, shown, held)
                    given = {"decoder_input": embedded, "extra_block_kwargs": {"context": deep}}
            previous = torch.from_numpy(before).to(self._device)
            if self._replay is not None:
                if number == len(self._routed):  # the first part passes a micro-batch first
                    self._routed.append(self._replay.plan(own, previous, ids.shape, held))
                self._replay.begin(self._routed[number], part, trains=loss is not None)
            hidden = model(tokens, positions, None, **given)

            def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
                local = torch.full(ids.shape, -1)
                local[:, held] = torch.arange(tokens.numel()).view(tokens.shape)
                local = local.flatten().to(self._device)
                at = (previous + 1).clamp(max=len(local) - 1)
                scores = self._scores(batch, hidden, local[previous], local[at], outputs)
                if own is not None:
                    scored.append((batch, scores))
                if loss is None:
                    return scores
                whole = sum(values.sum() for values in scores.values()) * 0.0 if own is None else loss(batch, scores)
                return whole, torch.ones((), dtype=torch.int, device=self._device), {}

            return hidden, finish

        widths = [padded(batch, multiple)[0].shape[1] + 1 for batch in batches if batch is not None]
        passes = [iter([(part, *own) for own in enumerate(batches)]) for part in range(len(self._models))]
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=passes, model=self._models, num_microbatches=len(batches),
            seq_length=max(widths, default=multiple), micro_batch_size=1, forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )  # fmt: skip
        return scored

    def _scores(
        self, batch: learn.PackedBatch, hidden: Tensor, before: Tensor, at: Tensor, outputs: Sequence[Output]
    ) -> Scores:  # fmt: skip
        """Return scores by name: of trained tokens, [tokens, ...], 0 elsewhere; `rewards` of rows, [rows].

        `before` and `at`: places of each token's predecessor and of the token in `hidden`; -1: another rank has it.
        """
        flat = features(hidden, self.options.sequence_parallel, split_head=self._head is not None)
        places = (batch.loss_mask & (before >= 0)).nonzero().squeeze(1)
        if self._head is not None:
            scored = self._head.vocabulary.score(
                flat.index_select(0, before[places]), self._head.logits, batch.tokens[places],
                replace(
                    wanted(outputs, batch, places, self._shape.vocabulary),
                    measured_entropy=self._update is not None and self._update.measures_entropy,
                ),
                temperature=self._spec.temperature, max_logits=self.options.logits_mb * 2**18,
            )  # fmt: skip
            return {name: spread(value, places, len(batch.tokens)) for name, value in scored.items()}
        weight = self._chunks[-1].score.weight.float()
        found = {}
        if "values" in self._scalars:
            found["values"] = places, before[places], len(batch.tokens)
        if "rewards" in self._scalars:
            ends = at[batch.lengths.cumsum(0) - 1]
            rows = (ends >= 0).nonzero().squeeze(1)
            found["rewards"] = rows, ends[rows], len(ends)
        return {
            name: spread(linear(flat.index_select(0, own).float(), weight).squeeze(-1), targets, size)
            for name, (targets, own, size) in found.items()
        }

    # -- forward ------------------------------------------------------------------------------------------------

    @collective_call
    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        able = self._scalars or (HEAD_OUTPUTS if self._replay is None else HEAD_OUTPUTS | {OUTPUT})
        outputs = parsed_outputs(columns, able)
        self._publication.check_whole()
        everything = set(range(len(chunk.rows)))
        with torch.no_grad():
            batches = self._micro_batches(chunk, everything, everything)
            scored = self._run(batches, [output for output in outputs if output.name != OUTPUT], None)
        parts = [dict(columns_of(batch, scores)) for batch, scores in scored]
        if any(output.name == OUTPUT for output in outputs):
            chosen = [
                self._replay.column(batch, made)
                for batch, made in zip(batches, self._routed, strict=True) if batch is not None and made is not None
            ]  # fmt: skip
            for part, experts in zip(parts, chosen, strict=False):  # only the last stage has scores
                part[OUTPUT] = experts
        return scored_rows(chunk, self._spec.rank, outputs, parts, self._grid.reports(self._spec.rank))

    # -- weights ------------------------------------------------------------------------------------------------

    @collective_call
    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        self.progress.check(version, "publish")
        return self._publication.send(version, transport, location, payload, base)

    @collective_call
    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        self.progress.check(manifest.version, "transfer")
        return self._publication.transfer(manifest, transport, receivers, wait_s)

    @collective_call
    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        self._publication.load(manifest, transport)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @collective_call
    def save(self, directory: str) -> None:
        save_checkpoint(self._copied("save"), directory, self.ranks)

    @collective_call
    def snapshot(self, directory: str) -> None:
        """Copy the state that a checkpoint holds, and let a thread write the copy."""
        self._writing.write(self._copied("snapshot"), directory)

    async def saved(self) -> None:
        await self._writing.over()

    def _copied(self, call: str) -> Snapshot:
        state = {"progress": self.progress.state(), "loss_scale": self._scale.state(), "base": self._publication.base}
        return take_snapshot(self._weights, self._saving(call), state, self.ranks)

    def load(self, directory: str) -> None:
        state = load_checkpoint(directory, self._weights, self._saving("load"), self._publication.base)
        self.progress = Progress(**state["progress"])
        self._scale.restore(state.get("loss_scale"))

    def _saving(self, call: str) -> Optimizer:
        """Return the optimizer; raise ValueError in a role without checkpoints, or while an update is open."""
        if self._optimizer is None:
            raise ValueError(f"{call}: role {self._spec.role} is not trained, so it has no checkpoints")
        if self._update is not None:
            raise ValueError(f"{call}: an update is open; finish or abort it first")
        return self._optimizer

    @collective_call
    def export(self, directory: str) -> None:
        tensors = self._weights.stream(self._dtype)
        adapters = self._weights.stream_trained() if self._lora and self._lora.table.export_adapter else iter(())
        try:
            if self.ranks.first:
                self._write(directory, tensors, adapters)
        finally:
            for _ in chain(tensors, adapters):  # no other rank waits for a rank that stopped early
                pass

    def _write(
        self, directory: str, tensors: Iterator[tuple[str, Tensor]], adapters: Iterator[tuple[str, Tensor]]
    ) -> None:  # fmt: skip
        """Write the whole model, and its adapters on their own if there are any."""
        with new_directory(directory) as path:
            scalar = bool(self._scalars)
            config = exported_config(self._config, str(self._dtype).removeprefix("torch."), scalar=scalar)
            write_folder(tensors, config, Path(self._path), self._files, path)
            if self._lora is not None and (found := dict(adapters)):
                names = (name for name in self._weights.entries if name.endswith(".weight"))
                modules = tuple(name.removesuffix(".weight") for name in names)
                write_adapters(self._lora, found, modules, self._path, scalar, path / FOLDER)

    def stop(self) -> None:
        super().stop()
        gc.collect()  # Megatron's modules form cycles; the threads of a process group end when it is freed

    def end(self) -> None:
        self._writing.stop()
        for module in chain(*(chunk.modules() for chunk in self._chunks)):
            # It holds the graph of its last pass, which gc cannot follow back to it.
            vars(module).pop("token_dispatcher", None)
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        RotaryEmbedding.forward.cache_clear()  # its keys are modules of stopped models, which hold process groups
        self._undo_set_up()


def spread(values: Tensor, places: Tensor, size: int) -> Tensor:
    """Return values at their places of `size` tokens or rows, 0 elsewhere, joined over the context-parallel ranks.

    All of these ranks compute the same loss; the backward pass gives each rank the gradient of its own values.
    """
    group = parallel_state.get_context_parallel_group()
    whole = values.new_zeros(size, *values.shape[1:]).index_put((places,), values)
    if group.size() == 1 or whole.is_floating_point():
        return reduce_from_tensor_model_parallel_region(whole, group=group)
    dist.all_reduce(whole, group=group)
    return whole


def _dummy(device: str) -> learn.PackedBatch:
    row = RowBatch((RowId(0, 0, 0, 0),), {
        "tokens": Ragged.of([np.zeros(2, np.int32)]), "loss_mask": Ragged.of([np.array([0, 1], np.uint8)]),
    })  # fmt: skip
    return learn.PackedBatch(row, device=device)
