"""The trainer `{{ cookiecutter.name }}`: trains a causal language model of `transformers` with AdamW, in float32 and on one rank.

`relax_core.trainer_kit` has the parts that do not depend on how a trainer computes. To put in another library, change the
methods that use `self._model` and `self._optimizer`.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from relax_core import learn
from relax_core.api import (
    Chosen, Chunk, ChunkPlan, ConfigError, Manifest, Options, Output, RowBatch, Trainer, TrainerSpec, UpdateOutcome,
    UpdateResult, Version,
)
from relax_core.learn.packed import columns_of
from relax_core.trainer_kit import checkpoint as files, chunk_rows, setup
from relax_core.trainer_kit.model_folder import check_folder, check_rows, fingerprint, published_arrays
from relax_core.trainer_kit.ranks import Ranks
from relax_core.trainer_kit.shards import Piece, read_into, to_host
from relax_core.trainer_kit.tokenizer_files import TokenizerFiles
from relax_core.trainer_kit.update import Progress, Update

TOKENS_PER_MICRO_BATCH = 2048
"""Tokens of a micro-batch, unless the configuration sets `batch.tokens_per_micro_batch`."""


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: a GPU if torch sees one."""


class {{ cookiecutter.class_name }}(Trainer[{{ cookiecutter.class_name }}Options]):
    """One rank, from `start` to `stop`. An update: `begin_update -> accumulate... -> finish_update | abort_update`."""

    def start(self, spec: TrainerSpec) -> Mapping[str, Any]:
        """Load the model and return facts about it. A forward-only role gets no optimizer."""
        setup.check_spec(spec, "{{ cookiecutter.name }}")
        for key, unable in (
            ("placement.actor.ranks", spec.world_size > 1), ("model.lora", spec.model.get("lora")),
            ("model.freeze", spec.model.get("freeze")), ("trainer.name", spec.media or setup.scalars(spec, self.build)),
        ):  # fmt: skip
            if unable:
                fix = "this trainer has one rank and trains all weights of a text model; choose another trainer"
                raise ConfigError(key, "{{ cookiecutter.name }}", fix)
        from transformers import AutoModelForCausalLM

        self._undo_set_up, self._spec = setup.set_up(spec), spec
        self._device = setup.choose_device(self.options.device, spec.rank)
        self._publishes = setup.publish_format(spec, torch.float32)
        folder = check_folder(str(spec.model["path"]))
        self._files, self._progress = TokenizerFiles.of(spec.model), Progress()
        # eval: without dropout, log-probs equal those of the engines
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self._device).eval()
        self._update: Update | None = None
        self._transports: dict[str, Any] = {}
        if spec.role == "actor":
            self._algorithm = self.build(spec.algorithm)
            setup.check_outputs(self._algorithm)
            table = spec.optimizer
            self._optimizer = torch.optim.AdamW(
                self._model.parameters(), lr=table.lr, betas=table.betas, weight_decay=table.weight_decay
            )
        files.seed_all(spec.seed)
        return {
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "max_context": self._model.config.max_position_embeddings,
            "vocab_size": self._model.config.vocab_size,
            "fingerprint": fingerprint(self._weights(), self._publishes),
        }

    def plan(self, lengths: Sequence[int], world_size: int, tokens_per_micro_batch: int = 0) -> ChunkPlan:
        """Split rows into micro-batches. The role calls this method on an instance that was not started."""
        return learn.plan_micro_batches(lengths, world_size, tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH)

    # -- updates

    def begin_step(self, version: Version) -> None:
        """Begin the step at `version`; raise if the weights have another version."""
        self._progress.begin(version)

    def begin_update(self, denominators: Mapping[str, float]) -> None:
        """Zero the gradients and open an update."""
        self._optimizer.zero_grad()
        self._update = Update(self._algorithm, denominators)

    def accumulate(self, chunk: Chunk, last: bool) -> None:
        """Run forward and backward; the algorithm gives the loss of each micro-batch."""
        update, rows = self._open(), chunk.rows
        chunk_rows.check_lag(rows, self._algorithm, self._spec, self._progress.step)
        step_start = None if self._progress.updated else self._progress.step
        wanted = chunk_rows.with_gradient(rows, self._algorithm, "actor")
        for batch in self._micro_batches(chunk, wanted, wanted & chunk_rows.trained(rows)):
            outputs = self._score(batch, self._algorithm.outputs(), update.measures_entropy)
            update.loss(batch, outputs, step_start).backward()

    def finish_update(self, denominators: Mapping[str, float]) -> UpdateResult:
        """Rescale the gradient to the true counts, clip it and update; apply no gradient with NaN or infinity."""
        update, table = self._open(), self._spec.optimizer
        update.join([update.share()])  # with several ranks, the shares of all
        factor = update.denominators.rescale(denominators)
        parameters = list(self._model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.mul_(factor)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        lr, self._update = table.lr * learn.lr_factor(table, self._progress.step), None
        if not (update.finite and norm.isfinite()):
            self._optimizer.zero_grad()
            return UpdateResult(UpdateOutcome.NOT_FINITE, grad_norm=float(norm), lr=lr)
        if table.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, table.grad_clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._progress.updated = True
        return UpdateResult(UpdateOutcome.APPLIED, update.metrics(factor), float(norm), lr)

    def abort_update(self) -> None:
        """Discard the open update."""
        self._optimizer.zero_grad()
        self._update = None

    def _open(self) -> Update:
        if self._update is None:
            raise ValueError("no update is open; call begin_update first")
        return self._update

    # -- forward

    def forward(self, chunk: Chunk, columns: Sequence[str]) -> RowBatch:
        """Compute columns of rows without gradient, in the order of the rows."""
        outputs = chunk_rows.parsed_outputs(columns, setup.HEAD_OUTPUTS)
        every = set(range(len(chunk.rows)))
        with torch.inference_mode():
            parts = [columns_of(one, self._score(one, outputs)) for one in self._micro_batches(chunk, every, every)]
        return chunk_rows.scored_rows(chunk, self._spec.rank, outputs, parts, reports=True)

    def _micro_batches(self, chunk: Chunk, wanted: set[int], needed: set[int]) -> Any:
        config = self._model.config
        check_rows(chunk.rows, config.vocab_size, config.max_position_embeddings)
        return chunk_rows.micro_batches(
            chunk, self._spec.rank, wanted, needed, device=str(self._device), together=False
        )

    def _score(
        self, batch: learn.PackedBatch, outputs: Collection[Output], measure_entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return log-probs and further outputs [tokens, ...]; 0 where `loss_mask` is 0."""
        ids, before = chunk_rows.padded(batch)  # causal attention ignores the padding
        logits = self._model(input_ids=torch.from_numpy(ids).to(self._device), use_cache=False).logits
        trained = batch.loss_mask.nonzero().squeeze(1)
        predicted = logits.flatten(0, 1)[torch.from_numpy(before).to(self._device)[trained]]
        if self._spec.suppress_tokens:
            never = torch.tensor(self._spec.suppress_tokens, device=self._device)
            predicted = predicted.index_fill(-1, never, -1e9)
        size = self._model.config.vocab_size
        asked = chunk_rows.wanted(outputs, batch, trained, size)
        asked = learn.Wanted(asked.entropy, asked.top_k, asked.at, measured_entropy=measure_entropy)
        scored = learn.score_distribution(
            predicted, lambda logits: logits, batch.tokens[trained], asked, vocab_size=size,
            temperature=self._spec.temperature,
        )
        return {
            name: values.new_zeros(len(batch.tokens), *values.shape[1:]).index_put((trained,), values)
            for name, values in scored.items()
        }

    # -- weights and checkpoints

    def publish(
        self, version: Version, transport: Chosen, location: str, payload: Any = "full", base: str = ""
    ) -> Manifest:
        """Send the weights. A transport compares each version with the one before, so it is made once."""
        self._progress.check(version, "publish")
        key = f"{transport.name} {sorted(transport.options.items())}"
        if key not in self._transports:
            self._transports[key] = self.build(transport)
        tensors = published_arrays(self._weights(), self._publishes)
        sent: Manifest = self._transports[key].send(version, payload, base, tensors, location)
        return sent

    def save(self, directory: str) -> None:
        """Write weights, optimizer, progress and random state; the folder appears when it is complete."""
        ranks = Ranks(self._spec, self._device, timeout_s=60.0)
        tensors = self._weights(files.WEIGHTS) | self._moments()
        pieces = {name: Piece(to_host(tensor), (0,) * tensor.dim()) for name, tensor in tensors.items()}
        files.save_checkpoint(files.Snapshot.of(pieces, {"progress": self._progress.state()}, ranks), directory, ranks)

    def load(self, directory: str) -> None:
        """Restore what `save` wrote, bit for bit."""
        state, found = files.look(Path(directory))
        weights = self._weights()
        files.check_architecture(directory, found, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        parameters = dict(self._model.named_parameters())
        self._optimizer.state.clear()
        for key, stored in found.items():
            if key.startswith(files.MOMENTS):
                name, _, moment = key.removeprefix(files.MOMENTS).rpartition("/")
                device = self._device if stored.shape else "cpu"  # the number of updates stays on the host
                room = torch.zeros(stored.shape, dtype=stored.dtype, device=device)
                self._optimizer.state[parameters[name]][moment] = room
        read_into(self._weights(files.WEIGHTS) | self._moments(), Path(directory))
        files.restore_random_state(state["random"])
        self._progress = Progress(**state["progress"])

    def export(self, directory: str) -> None:
        """Write a Hugging Face folder with the run's tokenizer and chat template."""
        with files.new_directory(directory) as folder:
            self._model.save_pretrained(folder)
            self._files.write(folder)

    def stop(self) -> None:
        """Undo what `start` set for the whole process."""
        self._undo_set_up()

    def _weights(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the weights by their names in a Hugging Face folder, where tied weights appear once."""
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        return {f"{prefix}{name}": value for name, value in self._model.state_dict().items() if name not in tied}

    def _moments(self) -> dict[str, Tensor]:
        """Return the optimizer's state by parameter and moment."""
        state = self._optimizer.state
        return {
            f"{files.MOMENTS}{name}/{moment}": value
            for name, parameter in self._model.named_parameters()
            for moment, value in state.get(parameter, {}).items()
        }
