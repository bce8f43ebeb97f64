# SPDX-License-Identifier: Apache-2.0
"""One started rank of the trainer: updates, forward passes, publication and checkpoints of one model.

A rank neither claims rows nor plans chunks: each chunk arrives with its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from relax_core import learn
from relax_core.api import (
    Algorithm,
    Chosen,
    Chunk,
    Manifest,
    Output,
    Ragged,
    RowBatch,
    TrainerSpec,
    TrainerWork,
    UpdateOutcome,
    UpdateResult,
    Version,
)
from relax_core.api.weights import Payload
from relax_core.learn.attention import longest_row
from relax_core.learn.huggingface import use_float32_head
from relax_core.learn.packed import columns_of
from relax_core.trainer_kit.checkpoint import Snapshot, Writing, new_directory, save_checkpoint, seed_all
from relax_core.trainer_kit.chunk_rows import (
    check_lag,
    micro_batches,
    parsed_outputs,
    scored_rows,
    trained,
    with_gradient,
)
from relax_core.trainer_kit.lora import FOLDER
from relax_core.trainer_kit.model_folder import check_rows, fingerprint
from relax_core.trainer_kit.offload import check_offload
from relax_core.trainer_kit.rank_trainer import StartedRank
from relax_core.trainer_kit.ranks import Ranks, collective_call
from relax_core.trainer_kit.row_media import RowMedia, check_text_only
from relax_core.trainer_kit.setup import (
    HEAD_OUTPUTS,
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
from relax_plugin_torch.adapters import Dropout, choose_trained
from relax_plugin_torch.blocks import compile_blocks, recompute_blocks
from relax_plugin_torch.checkpoint import load_checkpoint, take_snapshot
from relax_plugin_torch.flops import FlopCounter, peak_of
from relax_plugin_torch.freezing import hold_frozen_in
from relax_plugin_torch.head import ScalarPolicy, load_scalar_model
from relax_plugin_torch.model import export_folder, load_model, named_tensors, own_tensors, whole_tensors
from relax_plugin_torch.offloading import Offloader
from relax_plugin_torch.optimizer import advance, check_whole, make_optimizer
from relax_plugin_torch.options import TorchOptions
from relax_plugin_torch.policy import Policy
from relax_plugin_torch.publication import Publication
from relax_plugin_torch.routing_replay import OUTPUT, RoutingReplay
from relax_plugin_torch.setup import choose_attention, frozen_format, rounded
from relax_plugin_torch.sharding import alike, gathered, local, shard, shared_out, suits, towers, whole
from relax_plugin_torch.tensor_parallel import TensorParallelGroup, check_media, check_tensor_parallel
from relax_plugin_torch.trainer import TorchTrainer


class Rank(StartedRank, TorchTrainer):
    """The model, optimizer and training progress of one rank."""

    def begin(self, spec: TrainerSpec) -> None:
        check_spec(spec, "torch")
        options, build = self.options, self.build
        self._undo_set_up = set_up(spec)
        self._device = choose_device(options.device, spec.rank)
        check_offload(options.offload_optimizer, self._device)
        self._dtype = choose_format(spec.model.get("dtype", "float32"), self._device)
        self._publishes = publish_format(spec, self._dtype)
        self._scale = LossScale.of(self._dtype, options.loss_scale, options.loss_scale_window)
        self._scalars = scalars(spec, build)
        self._load(options)
        self._longest_row = longest_row(self._model.config)
        self.progress = Progress()
        self._update: Update | None = None
        self._adapters = choose_trained(self._model, spec)
        if self._adapters is not None:
            self._adapters.base = fingerprint(named_tensors(self._model, self._adapters), self._publishes)
        self.counter = self._policy.counter = FlopCounter(self._model, peak_of(self._device, self._dtype, options))
        hold_frozen_in(self._model, frozen_format(self._publishes, self._dtype))
        if options.activation_checkpointing:
            recompute_blocks(self._model, draws=self._adapters is not None and self._adapters.table.dropout > 0)
        self._choose_algorithm()
        check_media(spec, options.tensor_parallel)
        check_tensor_parallel(self._model, spec.world_size, options.tensor_parallel, self._adapters is not None)
        self.ranks = Ranks(spec, self._device, options.collective_timeout_s)
        with self.ranks.meeting("start"):
            self._tensor_group = TensorParallelGroup.of(
                spec.rank, spec.world_size, options.tensor_parallel, self._device
            )
            self._tensor_group.cut(self._model)
            self._sharded = self._shard(options.sharding)
            if options.compile:
                compile_blocks(self._model, self._policy.attend)
        self._publication = Publication(self._model, self._publishes, build, self.ranks.first, self._adapters)
        self._dropout = Dropout(self._model, spec.rank, self._device, self._adapters)
        self._make_optimizer()
        self._offloader = Offloader(
            self._model, getattr(self, "_optimizer", None), self._device, apart=options.offload_optimizer
        )
        self._writing = Writing()
        seed_all(spec.seed)

    def _load(self, options: TorchOptions) -> None:
        self._files = TokenizerFiles.of(self._spec.model)
        path, autocast = str(self._spec.model["path"]), rounded(self._dtype)
        attention = choose_attention(options.attention, self._device, self._dtype, self._spec.deterministic)
        if self._scalars:
            check_text_only(self._spec)
            self._model = load_scalar_model(path, attention, self._device, auto=options.attention == "auto")
            self._row_media = RowMedia(self._model, self._spec.media)
            self._policy: Policy = ScalarPolicy(
                self._model, self._scalars, autocast=autocast, share_prefixes=options.share_prefixes
            )
            return
        self._model = load_model(path, attention, self._device, auto=options.attention == "auto")
        if autocast is not None and self._spec.model.get("head_dtype") == "float32":
            use_float32_head(self._model, self._publishes)
        self._row_media = RowMedia(self._model, self._spec.media)
        self._policy = Policy(
            self._model, temperature=self._spec.temperature, autocast=autocast, max_logits=options.logits_mb * 2**18,
            share_prefixes=options.share_prefixes, row_media=self._row_media, suppress=self._spec.suppress_tokens,
            routing_replay=RoutingReplay.of(self._model, self._spec, options),
        )  # fmt: skip

    def _choose_algorithm(self) -> None:
        if self._spec.role not in TRAINED_ROLES:
            self._model.requires_grad_(False)
            return
        self._algorithm: Algorithm = self.build(self._spec.algorithm)
        check_outputs(self._algorithm, self._spec.role)

    def _shard(self, wanted: str) -> bool:
        """Shard the weights over the ranks if `wanted` asks for it; return True if they are sharded.

        With `auto`, all ranks shard if any rank's GPU needs it, so that ranks with different GPUs decide alike.
        A single tensor-parallel group is not sharded.
        """
        if self.ranks.size == self._tensor_group.size:
            return False
        if wanted == "none" or (wanted == "auto" and not any(self.ranks.tell(suits(self._model, self._device)))):
            return False
        aside = towers(self._model) if self._spec.media else []
        self._policy.through(shard(self._model, self._device, self.ranks.size, self._tensor_group.data, aside))
        return True

    def _make_optimizer(self) -> None:
        if self._spec.role not in TRAINED_ROLES:
            return
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        check_whole(self.options.optimizer, self._sharded)
        self._optimizer = make_optimizer(self._model, self._spec.optimizer, self.options.optimizer)

    @collective_call
    def facts(self) -> dict[str, Any]:
        base = self._adapters.base if self._adapters is not None else ""
        return {
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "trainable": sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad),
            "max_context": self._longest_row,
            "vocab_size": self._model.config.get_text_config().vocab_size,
            "fingerprint": base or fingerprint(whole_tensors(self._model, self.ranks.first), self._publishes),
            "base": base,
            "device": str(self._device),
            "offloads": self._offloader.able,
            "threads": torch.get_num_threads(),
            "ranks": self.ranks.size,
            "sharding": "fsdp" if self._sharded else "none",
            "tensor_parallel": self._tensor_group.size,
        }

    # -- updates ------------------------------------------------------------------------------------------------

    def begin_step(self, version: Version) -> None:
        super().begin_step(version)
        self.counter.take()  # earlier work, such as an evaluation's, is not the step's

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        if self._spec.role not in TRAINED_ROLES:
            raise ValueError(f"begin_update: role {self._spec.role} only computes forward passes")
        if not self.progress.begun:
            raise ValueError("begin_update: no step was begun; call begin_step first")
        self._offloader.need("weights", "optimizer", "gradients")
        self._optimizer.zero_grad(set_to_none=True)
        self._dropout.begin()
        self._update = Update(self._algorithm, denominators, self._spec.role, self._scale.value)

    @collective_call
    def accumulate(self, chunk: Chunk, last: bool) -> None:
        update = self._open_update()
        check_lag(chunk.rows, self._algorithm, self._spec, self.progress.step)
        step_start = None if self.progress.updated else self.progress.step
        wanted = with_gradient(chunk.rows, self._algorithm, self._spec.role)
        with self._dropout.on():
            for batch in self._micro_batches(chunk, wanted, wanted & trained(chunk.rows)):
                if batch is None:
                    self._policy.attend().backward()
                    continue
                asked = self._algorithm.outputs()
                outputs = self._policy.score(batch, asked, measure_entropy=update.measures_entropy)
                update.loss(batch, outputs, step_start).backward()
                if self._policy.routing_replay is not None:
                    update.measured(self._policy.routing_replay.metrics())

    @collective_call
    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        update = self._open_update()
        update.join(self.ranks.tell(update.share(speaks=self._tensor_group.first)))
        factor = update.denominators.rescale(denominators)
        norm = self._finish_gradient(factor / self._scale.value)
        self._update = None
        lr = self._spec.optimizer.lr * learn.lr_factor(self._spec.optimizer, self.progress.step)
        if not (np.isfinite(norm) and update.finite):
            self._optimizer.zero_grad(set_to_none=True)
            lower = update.finite and self._scale.overflowed()
            return UpdateResult(UpdateOutcome.OVERFLOW if lower else UpdateOutcome.NOT_FINITE, grad_norm=norm, lr=lr)
        with self._offloader.with_optimizer():
            advance(self._optimizer, lr)
        self.progress.updated = True
        self._optimizer.zero_grad(set_to_none=True)
        scale = {"train/loss_scale": (self._scale.value, 1.0)} if self._scale.dynamic else {}
        self._scale.applied()
        return UpdateResult(UpdateOutcome.APPLIED, {**update.metrics(factor), **scale}, norm, lr)

    def work(self) -> TrainerWork:
        """Return the work since the last call; ranks of a tensor-parallel group share the work of its first rank."""
        done = self.counter.take()
        return done if self._tensor_group.first else TrainerWork(peak_flops_per_s=done.peak_flops_per_s)

    def _finish_gradient(self, factor: float) -> float:
        """Sum the gradients over the ranks, multiply them by `factor` and clip them; return the norm before clipping.

        Parameters that no row reached get a gradient of 0, so that their optimizer moments still decay.
        """
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._tensor_group.add_up_partial()
        # FSDP summed the gradients of sharded parameters during the backward pass
        own = [p for p in self._parameters if not (self._sharded and shared_out(p))]
        self.ranks.add_up([local(p.grad) for p in own if p.grad is not None], self._tensor_group.data)
        parts = [[self._parameters[index] for index in group] for group in alike(self._parameters)]
        gradients = [[p.grad for p in part if p.grad is not None] for part in parts]
        if factor != 1.0:
            for part in gradients:
                torch._foreach_mul_(part, factor)
        norms = [whole(torch.nn.utils.get_total_norm(part)) for part in gradients]
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
        if self._spec.optimizer.grad_clip > 0:
            for some in parts:
                torch.nn.utils.clip_grads_with_norm_(some, self._spec.optimizer.grad_clip, norm)
        return float(norm)

    def abort_update(self) -> None:
        self._update = None
        if self._spec.role in TRAINED_ROLES:
            self._optimizer.zero_grad(set_to_none=True)

    def _open_update(self) -> Update:
        if self._update is None:
            raise ValueError("no update is open; call begin_update first")
        return self._update

    def _micro_batches(self, chunk: Chunk, wanted: set[int], needed: set[int]) -> Iterator[learn.PackedBatch | None]:
        """Yield this rank's micro-batches; None for one in which only other ranks have rows, if weights are sharded."""
        check_rows(chunk.rows, self._model.config.get_text_config().vocab_size, self._longest_row)
        self._row_media.check(chunk.rows)
        yield from micro_batches(
            chunk, self._spec.rank, wanted, needed, device=str(self._device), together=self._sharded
        )

    # -- forward ------------------------------------------------------------------------------------------------

    @collective_call
    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        able = self._scalars or (HEAD_OUTPUTS if self._policy.routing_replay is None else HEAD_OUTPUTS | {OUTPUT})
        outputs = parsed_outputs(columns, able)
        self._offloader.need("weights")
        self._publication.check_whole()
        spread = self._sharded or self._tensor_group.size > 1
        # tensors that FSDP or tensor parallelism make in inference mode could not be trained later
        with torch.inference_mode(not spread), torch.no_grad():
            parts = list(self._filled(chunk, outputs))
        return scored_rows(chunk, self._spec.rank, outputs, parts, self._tensor_group.first)

    def _filled(self, chunk: Chunk, outputs: Sequence[Output]) -> Iterator[dict[str, Ragged]]:
        everything = set(range(len(chunk.rows)))
        for batch in self._micro_batches(chunk, everything, everything):
            if batch is None:
                self._policy.attend()
            else:
                filled = columns_of(batch, self._policy.score(batch, [one for one in outputs if one.name != OUTPUT]))
                replay = self._policy.routing_replay
                if replay is not None and any(one.name == OUTPUT for one in outputs):
                    filled[OUTPUT] = replay.column(batch)
                yield filled

    # -- weights ------------------------------------------------------------------------------------------------

    @collective_call
    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Payload = "full", base: str = ""
    ) -> Manifest:
        self.progress.check(version, "publish")
        self._offloader.need("weights")
        return self._publication.send(version, transport, location, payload, base)

    @collective_call
    def transfer(self, manifest: Manifest, transport: Chosen, receivers: int, wait_s: float) -> int:
        self.progress.check(manifest.version, "transfer")
        self._offloader.need("weights")
        return self._publication.transfer(manifest, transport, receivers, wait_s)

    @collective_call
    def load_published(self, manifest: Manifest, transport: Chosen) -> None:
        self._offloader.need("weights")
        self._publication.load(manifest, transport)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @collective_call
    def save(self, directory: str) -> None:
        save_checkpoint(self._copied("save"), directory, self.ranks)

    def snapshot(self, directory: str) -> None:
        """Copy the state that a checkpoint holds, and let a thread write the copy."""
        self._writing.write(self._copied("snapshot"), directory)

    async def saved(self) -> None:
        await self._writing.over()

    def _copied(self, call: str) -> Snapshot:
        self._refuse_within_update(call)
        state = {"progress": self.progress.state(), "loss_scale": self._scale.state()}
        state["optimizer"] = self.options.optimizer
        self._offloader.need("weights")
        with self._offloader.with_optimizer():
            return take_snapshot(self._model, self._optimizer, state, self.ranks, self._adapters)

    def load(self, directory: str) -> None:
        self._refuse_within_update("load")
        kind = self.options.optimizer
        self._offloader.need("weights")
        with self._offloader.with_optimizer():
            state = load_checkpoint(directory, self._model, self._optimizer, self._adapters, kind)
        self.progress = Progress(**state["progress"])
        self._scale.restore(state.get("loss_scale"))

    @collective_call
    def export(self, directory: str) -> None:
        self._offloader.need("weights")
        own, source = gathered(own_tensors(self._model), self.ranks.first), str(self._spec.model["path"])
        adapters = self._adapters
        if self.ranks.first:
            with new_directory(directory) as path:
                state = own if adapters is None else adapters.folded(own)
                export_folder(self._model, state, self._files, path, self._dtype)
                if adapters is not None and adapters.table.export_adapter:
                    adapters.write(own, source, path / FOLDER)

    def _refuse_within_update(self, call: str) -> None:
        if self._spec.role not in TRAINED_ROLES:
            raise ValueError(f"{call}: role {self._spec.role} is not trained, so it has no checkpoints")
        if self._update is not None:
            raise ValueError(f"{call}: an update is open; finish or abort it first")

    # -- offload --------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[str]) -> int:
        """Offload parts; return the bytes that were freed.

        On a GPU, weights and optimizer move to host memory and gradients are dropped. A CPU frees gradients only.
        """
        if self._update is not None:
            raise ValueError("offload: an update is open; finish or abort it first")
        return self._offloader.offload(parts)

    def onload(self, parts: Sequence[str]) -> None:
        self._offloader.onload(parts)

    def end(self) -> None:
        self._writing.stop()
        self.ranks.leave()
        self._undo_set_up()
