# SPDX-License-Identifier: Apache-2.0
"""The tables of the configuration. Those that define the experiment come before those that may change at a resume.

Each key means the same for every engine and trainer. The string under a field is the field's documentation:
the reference, the schema, `relax config explain` and `relax init` use it.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from relax_core.api.bus import LateRule
from relax_core.api.family import RoutingReplayMode, ToolCallFormat
from relax_core.api.options import LITERAL, Options, Secret
from relax_core.api.role import CREDENTIALS
from relax_core.config.annotation import PathOrText

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Format = Literal["float32", "bfloat16", "float16"]
HOST = re.compile(r"(\*\.)?\w([\w-]*\w)?(\.\w([\w-]*\w)?)*\.?")

Share = Literal["", "own", "actor", "rollout"]
SHARES: dict[str, dict[str, Share]] = {
    "colocate": {"rollout": "actor", "actor_fwd": "actor", "reference": "actor", "teacher": "actor",
                 "critic": "actor"},
    "hybrid": {"actor_fwd": "actor", "reference": "actor", "teacher": "actor", "critic": "actor"},
    "async": {},
}  # fmt: skip
"""placement mode -> role -> the role whose devices it uses; a role that is not listed has its own devices."""


class Lora(Options):
    """Low-rank adapters, trained instead of all weights."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters; the output of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Modules in which linear layers get adapters: ends of module names, such as `q_proj` or `layers.0.mlp`; `*`
    matches any text. Empty: every linear layer of the language model except its head."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout before the adapters, in training only. Above 0, trained log-probs differ from sampled ones."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank, so that adapters of high rank keep learning (rsLoRA)."""
    dora: bool = False
    """Also train the norm of each weight row (DoRA). Then full weights are published, with the adapters folded in."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full, besides adapters. Then full weights are published, with the adapters folded in."""
    export_adapter: bool = True
    """Also export the adapters in peft's format, to `adapter`; the exported model has the adapters folded in."""


class ModelTable(Options):
    """The policy, which is the model that is trained."""

    path: Path
    """Folder of a Hugging Face model: config.json, weights, tokenizer.json."""
    dtype: Format = "float32"
    """Number format in which trainers compute, and also engines unless `rollout.dtype` is set. The trained weights and
    the optimizer state are always float32."""
    head_dtype: Literal["", "float32"] = ""
    """Number format of the logits. `float32`: trainers and engines multiply hidden states by the language head in
    float32, so that the logits are not rounded to `dtype`: bfloat16 has steps of 0.125 between 16 and 32. Weights are
    published and rounded as without this key. On a GPU the head takes longer. Empty: `dtype`."""
    tokenizer: Path | None = None
    """Folder of another tokenizer; absent: the tokenizer in `path`."""
    chat_template: PathOrText = ""
    """File that holds a Jinja chat template, or the template itself; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables for the chat template, such as `enable_thinking = false`."""
    chat_template_date: str | None = None
    """Date, such as `2026-01-31` or `2026-01-31T12:00:00`, that `strftime_now` shows in the chat templates of all models;
    absent: the local time at which the run began, also after it is resumed."""
    tool_calls: ToolCallFormat = "auto"
    """Format in which the policy writes tool calls; `auto`: the format that its chat template uses."""
    lora: Lora | None = None
    """Low-rank adapters; absent: all weights are trained."""
    routing_replay: RoutingReplayMode = "off"
    """Source of the routing of tokens to experts in training, for a mixture of experts. `off`: the trainer's router
    decides anew in each pass. `rollout`: reuse the engine's routing (R3). `recompute`: reuse the trainer's routing from
    a forward pass at the start of a step with several updates (R2)."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that are not trained: names that the model family defines (`vision`), or ends of module names
    such as `embed_tokens` or `layers.0.*`; `*` matches any text."""


class MediaSourcesTable(Options):
    """Hosts and folders that media of tasks and of environments may come from."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts from which media are fetched by URL: a name such as `images.example.org`, or `*.example.org` for all hosts
    below it. Empty: no URL is fetched. A non-public address (private, loopback, link-local, ...) is contacted only if
    the list has the address or its network, such as `10.1.0.0/16`, even if an allowed name resolves to it."""
    allowed_folders: tuple[Path, ...] = ()
    """Folders that paths and `file:` URLs, links resolved, may point into. The data file's folder is always allowed."""
    fetch_timeout_s: PositiveFloat = 20.0
    """Seconds to fetch one URL, redirects included; the modality processor's `timeout_s` limits this time too."""

    @field_validator("allowed_hosts")
    @classmethod
    def _names_of_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            try:
                ip_network(host, strict=False)
            except ValueError as error:
                if HOST.fullmatch(host):
                    continue
                fix = "write a name like `images.example.org`, `*.example.org` for all hosts below it, or an address"
                raise PydanticCustomError(
                    "host", "{host} is not a host; {fix}", {"host": repr(host), "fix": fix}
                ) from error
        return hosts


class DataTable(Options):
    """The tasks to train on."""

    train: Path
    """Task file: one JSON object per line with `prompt` (text or messages) and, if rewards need it, `answer`."""
    columns: dict[str, str] = {}
    """Names of the file's columns that differ from Relax's names, such as `{prompt = "question"}`."""
    system_prompt: str = ""
    """System message to put before every chat prompt that lacks a system message; empty: add nothing."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt; absent: the model's context minus `rollout.max_new_tokens`."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """Treatment of a task whose prompt is too long: `skip` it (skipped tasks are counted and reported), `truncate` its
    beginning, or refuse to start with an `error`. For a row of a dataset, `truncate` cuts its end."""
    max_row_tokens: PositiveInt | None = None
    """Most tokens of a dataset's row, prompt and completion together; absent: the model's context."""
    train_on: Literal["completion", "all"] = "completion"
    """Tokens of a dataset's row that are trained: the `completion` (in a conversation, every turn of the assistant), or
    `all` tokens, prompt included."""
    max_bad_golds: float = Field(0.05, ge=0.0, le=1.0)
    """Largest share of tasks whose own gold answer may score less than a right response. The share is measured at the
    start by the rewards that read gold answers, on at most 1,000 tasks of each file; above the limit, the run is
    refused. Tasks whose gold answer can't be read are never trained."""
    shuffle: bool = True
    """Use tasks in a seeded random order, different in each epoch; false: in the order of the file, without another
    sampler than `shuffle`."""
    media: MediaSourcesTable = MediaSourcesTable()
    """Hosts and folders that media may come from."""


class TeacherTable(Options):
    """A model that the policy learns from, if the algorithm uses teachers; each task has exactly one teacher."""

    path: Path | None = None
    """Folder of a Hugging Face model with the policy's tokenizer; a trainer runs its forward passes."""
    engine: str = ""
    """Pool of `[[engines]]` that scores the rows, in place of `path`; only for log-probs of the sampled tokens."""
    only: str = Field("", pattern=r"^$|^[^=]+=")
    """Limits the teacher to tasks in which a column has this value, such as `domain=maths`; dots address values inside
    a column that is a table. Empty: all tasks."""
    dtype: Literal["", Format] = ""
    """Number format of the teacher's weights; empty: `model.dtype`. With `engine`, set the pool's `dtype` instead."""


class EngineTable(Options):
    """A pool of engines with a model of its own, for rewards, environments and teachers."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Name by which rewards, environments and teachers use the pool, such as `judge`."""
    path: Path
    """Folder of the pool's Hugging Face model, whose weights are never updated."""
    engine: dict[str, Any] = {}
    """Engine of the pool: a name, or a table with a name, `python` and its options. Empty: the engine of `[engine]`."""
    count: PositiveInt = 1
    """Number of engine processes."""
    devices: Literal["own", "shared", "deferred"] = "own"
    """`own`: the pool has its own devices. `shared` and `deferred`: the pool takes turns with the policy's engines on
    their devices. A `shared` pool gets its turn when `turn_requests` requests wait or the policy's engines are idle; a
    `deferred` pool only when those engines are idle, at the end of a wave of samples. Both get a turn after
    `turn_wait_s` at the latest. A teacher's pool gets a turn when the rows of a whole step wait for the teacher."""
    turn_requests: PositiveInt = 64
    """Number of waiting requests that gives a `shared` pool its turn while the policy's engines have work."""
    turn_wait_s: PositiveFloat = 300.0
    """Most seconds that a request waits for its pool's turn while the policy's engines have work. Waiting for a turn
    does not count against `timeout_s`; after `rollout.step_timeout_s` the request fails."""
    max_context: NonNegativeInt = 0
    """Most tokens of prompt and completion together; 0: the model's context."""
    dtype: Literal["", Format] = ""
    """Number format of the pool's weights; empty: `model.dtype`."""
    timeout_s: PositiveFloat = 600.0
    """Seconds from sending a request until the request fails; the caller may set a shorter limit."""
    tokenizer: Path | None = None
    """Folder of another tokenizer; absent: the tokenizer in `path`."""
    chat_template: PathOrText = ""
    """File that holds a Jinja chat template, or the template itself; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables for the chat template, such as `enable_thinking = false`."""
    gpus_per_engine: NonNegativeFloat | None = None
    """GPUs per engine; 0: none; absent: 1 if the machine has GPUs, else 0."""
    threads: NonNegativeInt = 0
    """CPU threads per engine process; 0: one thread."""
    requests_per_engine: PositiveInt = 256
    """Most requests that one engine runs at once; further requests wait for the first engine that has room."""
    silence_s: PositiveFloat = 20.0
    """Seconds without an answer until an engine gets a health check. An engine that does not answer the check within
    the same time is replaced."""


class RolloutTable(Options):
    """Generation of samples."""

    groups_per_step: PositiveInt = 32
    """Number of tasks in one step; each task becomes a group. With a dataset: number of rows, or pairs, in one step."""
    group_size: PositiveInt = 8
    """Number of samples of each task."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of one turn of the policy."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; training divides the logits by the same number."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: share of the probability mass from which tokens are sampled; 1: the whole distribution. Below 1,
    set `algorithm.correction` to "truncate": with "behaviour", the plan warns of tokens that lose their gradient."""
    top_k: NonNegativeInt = 0
    """Number of the likeliest tokens from which a token is sampled, before `top_p`; 0: all tokens. As with `top_p`,
    engines return log-probs of the truncated distribution, and the trainer those of the whole distribution."""
    dtype: Literal["", Format] = ""
    """Number format of the engines' weights and caches, and of published weights; empty: `model.dtype`."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, in addition to the model's own end tokens."""
    max_turns: PositiveInt = 32
    """Most turns of the policy in one sample."""
    token_budget: PositiveInt | None = None
    """Most tokens of one sample, prompt and observations included; absent: the model's context."""
    late: LateRule = "wait"
    """Treatment of groups that would miss the staleness bound: `wait` for them before later groups are trained, `mask`
    their stale tokens, `drop` them, or `regenerate` them (dropped after several attempts). A row that is masked whole
    still counts in a mean over rows or samples; a mean over tokens, of all or of a sample, counts only unmasked tokens.
    Advantages are computed before the mask."""
    truncated: Literal["train", "mask"] = "train"
    """Treatment of samples that a token or turn limit cut off. `train`: as all samples. `mask`: rewards judge them, and
    their rewards, turns and lengths count in the statistics of their group and batch, so the advantages of the remaining
    samples are the same. But they are not trained, and the loss's means leave them out (overlong filtering, DAPO, arXiv
    2503.14476, section 3.4). The filter `truncated` drops whole groups instead."""
    spare_groups: NonNegativeInt = 0
    """Number of extra groups to generate, so that a step does not wait for the slowest groups; the groups that finish
    last are dropped. Long answers finish last, so the policy trains on fewer long answers."""
    refill_limit: NonNegativeInt = 20
    """Stop the run if filters reject this many times `groups_per_step` groups in a row; 0: no limit."""
    failure_limit: float = Field(0.5, gt=0.0, le=1.0)
    """Stop the run if more than this share of the last 256 samples (or of the samples in play, if these are more) fail
    alike: with the same outcome of the same environment, engine or media, or at the same place of a reward. A run also
    stops if its first 16 samples or more fail alike, or if none of the last 256 can be judged; at 1, only then."""
    kv_across_versions: bool = False
    """Keep the KV cache of unfinished samples when new weights arrive; this is faster, but new tokens then count as old
    as the cache. Needs `max_staleness` of 1 or more. False: the cache is computed again."""
    media_store_mb: PositiveInt = 65536
    """Size limit, in MB, of the processed media in the run directory. Above the limit, media that no group needs are
    deleted, the least recently used first, and processed again if needed later. Media in use are never deleted."""
    turn_timeout_s: PositiveFloat = 3600.0
    """Seconds from the request of a turn of the policy until the turn fails; time in which the engines are paused does
    not count. The sample then ends with outcome `engine_timeout`, which is never judged."""
    step_timeout_s: PositiveFloat = 3600.0
    """Seconds that a step waits for its groups; then the step trains on all groups that are ready. If no group is
    ready, unfinished groups are dropped and the step waits for new groups."""


class OptimizerTable(Options):
    """The optimizer. If the trainer uses another optimizer than AdamW, these settings apply to that optimizer."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate. Its meaning depends on the trainer's optimizer: with AdamW, the size of a step in each weight;
    with another optimizer, such as adafactor, a value of another scale."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` reach 0 at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises from 0."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay: decoupled from the gradient by AdamW and adafactor, added to the gradient by SGD."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to this norm. 0: no clipping."""
    not_finite: Literal["skip", "roll-back", "stop"] = "skip"
    """Reaction to an update whose loss or gradient is NaN or infinite; such an update is never applied. `skip`:
    continue with the next rows. `roll-back`: restart the trainer from its last checkpoint; if the same step fails
    again, skip its update. `stop`: stop the run. Several such updates in a row stop the run in any case."""


class CriticTable(Options):
    """The critic, whose values are the baseline of the advantages; it uses `[optimizer]` apart from `lr`."""

    path: Path | None = None
    """Folder of the critic's first model, such as a reward model; absent: `model.path` with a head of zeros."""
    lr: PositiveFloat | None = None
    """Peak learning rate; absent: 10 times `optimizer.lr`. A critic learns faster than the policy because its head
    starts at zeros."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps at the start in which only the critic is trained and the policy does not change. The policy's
    learning rate starts its warm-up and its schedule after these steps."""


class ReferenceTable(Options):
    """The reference model, from which an algorithm measures the policy's divergence."""

    path: Path | None = None
    """Folder of a Hugging Face model with the policy's tokenizer; absent: `model.path`, the policy at the run's start.
    Its weights never change. Refused if the algorithm compares with no reference, as with `algorithm.kl_coef = 0`."""


class BatchTable(Options):
    """Division of a step's samples into optimizer updates."""

    updates_per_step: PositiveInt = 1
    """Optimizer updates in one pass over a step's rows; with more than 1, later updates train a policy that has changed
    since sampling."""
    passes: PositiveInt = 1
    """Passes over a step's rows (PPO's epochs, GRPO's iterations); each pass makes `updates_per_step` updates on the
    same groups. Needs an algorithm that bounds how far later updates move the policy, such as grpo or ppo. All ratios
    are to the policy that `correction` names, so `policy/clip_fraction` grows with the passes."""
    tokens_per_micro_batch: NonNegativeInt = 0
    """Most tokens of one forward and backward pass; 0: the trainer decides. Results do not depend on this number."""
    stream: bool = True
    """Start to train on a step's first groups while later groups are still being generated, if algorithm, trainer and
    placement allow it; the update still uses all rows of the step. False: wait for all groups of the step."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates of one step."""
        return self.passes * self.updates_per_step


class EvalSetTable(Options):
    """One evaluation set; `[eval]` provides the values of absent keys."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the set in metrics: `eval/<name>/mean`. Its tasks have the column `eval_set` with this name, so a reward
    with `only = "eval_set=<name>"` judges this set alone."""
    path: Path
    """Task file of the set."""
    columns: dict[str, str] = {}
    """Names of the file's columns, written as in `data.columns`; empty: the names of `data.columns`."""
    samples: PositiveInt | None = None
    """Number of samples per task; absent: `eval.samples`."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature, 0 is greedy; absent: `eval.temperature`."""
    max_new_tokens: PositiveInt | None = None
    """Most tokens of one turn of the policy; absent: `rollout.max_new_tokens`."""
    size: PositiveInt | None = None
    """Number of tasks to use, from the start of the file; absent: all."""


class EvalTable(Options):
    """Evaluation of the policy. The seeds are separate, so evaluation never influences training."""

    every: NonNegativeInt = 20
    """Steps between evaluations, with one more at the end; 0: no evaluation at all."""
    at_start: bool = True
    """Also evaluate before the first step."""
    samples: PositiveInt = 1
    """Number of samples per task."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature, 0 is greedy; absent: `rollout.temperature`."""
    size: PositiveInt | None = None
    """Number of tasks held out from the training file if there are no `[[eval.sets]]`; absent: a tenth of the tasks, at
    most 128. Training rows that equal a held-out task are not trained on. A resumed run never trains on the tasks that
    it held out when it began."""
    max_overlap: float = Field(1.0, ge=0.0, le=1.0)
    """Largest share of the tasks of a set of `[[eval.sets]]` that may also be in the training file, after normalisation
    of their text. Above the limit, the run is refused; below, the tasks are logged."""
    sets: tuple[EvalSetTable, ...] = ()
    """Evaluation sets; empty: `size` tasks of the training file."""

    @property
    def num_held_out(self) -> int | None:
        """Number of tasks that are held out of the training file; None: a share of the tasks."""
        return self.size if self.every and not self.sets else 0


class ExternalEngines(Options):
    """Engines that are started elsewhere, by `relax engine serve`, and join the pool while the run is live."""

    addresses: tuple[str, ...] = ()
    """Addresses, `HOST:PORT`, at which the run may call such engines; empty: none may join. Not encrypted: use loopback,
    a tunnel, or a network that only the run's machines reach."""
    token: Secret | None = None
    """Token that the run shows to these engines, of at least 16 characters."""


class EnginePlacement(Options):
    """Processes and devices of the policy's engines."""

    engines: PositiveInt = 1
    """Number of engine processes."""
    min_engines: PositiveInt | None = None
    """Number of the first engines, which never leave the pool; absent: all of `engines`."""
    gpus_per_engine: NonNegativeFloat | None = None
    """GPUs per engine; 0: none; absent: as many as the engine's parallel options need, or 0 if the machine has none."""
    threads: NonNegativeInt = 0
    """CPU threads per engine process; 0: one thread."""
    share: Share = ""
    """Role whose devices the engines use, in turns with that role, or `own`; empty: as `placement.mode` defines."""
    requests_per_engine: PositiveInt = 1024
    """Most requests that one engine runs at once; further requests wait for the first engine that has room."""
    backlog: PositiveInt = 1024
    """Number of requests that may wait for an engine, besides the running requests; while so many wait, samples hold
    back further requests. A new group starts only while fewer requests wait than run."""
    sessions: PositiveInt | None = None
    """Most samples in progress at once, including samples that wait for tools. New groups start while engines have room
    and the staleness bound allows more. Absent: as many as the bound allows; if unbounded, the samples of two steps."""
    prelaunch: NonNegativeInt = 0
    """Number of samples, in whole groups, whose environments start early: before the engines have room and the
    staleness bound allows the samples. Sampling waits for both. Ignored in deterministic runs."""
    kv_tokens_per_engine: NonNegativeInt | None = None
    """Number of tokens that the KV cache of one engine holds. An engine gets a request only if the cache has room for
    the request and all running requests; caches of sessions between two turns are kept while there is room. 0: no
    limit; absent: as the engine reports."""
    kv_reserve: float = Field(0.25, ge=0.0, le=1.0)
    """Cache to reserve for running requests, as a share of the tokens that they may still sample. 1: an engine never
    gets more than its cache holds. Less: more requests run at once, but caches are recomputed if many turns get
    long."""
    silence_s: PositiveFloat = 20.0
    """Seconds without an answer until an engine gets a health check. An engine that does not answer the check within
    the same time is replaced."""
    external: ExternalEngines = ExternalEngines()
    """Engines that are started elsewhere and may join."""

    @property
    def least(self) -> int:
        """Number of the first engines, which never leave."""
        return self.engines if self.min_engines is None else self.min_engines


class RankPlacement(Options):
    """Processes and devices of the ranks of a training role."""

    ranks: PositiveInt = 1
    """Number of rank processes."""
    gpus_per_rank: NonNegativeFloat | None = None
    """GPUs per rank; 0: none; absent: 1 if the machine has GPUs, else 0."""
    threads: NonNegativeInt = 0
    """CPU threads per rank process; 0: one thread."""
    share: Share = ""
    """Role whose devices the ranks use, in turns with that role, or `own`; empty: as `placement.mode` defines. The
    actor always has its own devices."""


class RolePlacement(RankPlacement):
    """Processes, devices and model of a role that a plugin provides."""

    path: Path | None = None
    """Folder of the role's model; absent: `model.path`."""


class PlacementTable(Options):
    """The placement of roles on devices; `placement = "async"` is short for the mode alone."""

    mode: Literal["colocate", "hybrid", "async"] = "colocate"
    """`colocate`: rollout and trainer take turns on the same devices. `hybrid`: rollout has its own devices.
    `async`: every role has its own devices."""
    rollout: EnginePlacement = EnginePlacement()
    """Engines of the policy."""
    actor: RankPlacement = RankPlacement()
    """Ranks that train the policy."""
    actor_fwd: RankPlacement = RankPlacement()
    """Ranks that compute log-probs with a step's first weights; on the actor's devices, the actor computes them."""
    reference: RankPlacement = RankPlacement()
    """Ranks that compute log-probs with the reference model."""
    critic: RankPlacement = RankPlacement()
    """Ranks that train the critic and compute values."""
    teacher: RankPlacement = RankPlacement()
    """Ranks of each teacher; several teachers take turns on the same devices."""
    roles: dict[str, RolePlacement] = {}
    """Ranks of the roles that plugins provide: name of the role -> placement."""
    elastic_labels: dict[str, str] = {}
    """Only with the runner ray: labels of the nodes, such as preemptible ones, for engines that join the live run.
    Everything else runs on nodes that have none of these labels; empty: all run anywhere."""
    check_memory: bool = True
    """Refuse to start a run that certainly needs more memory than is free; `--anyway` sets this key to false."""

    def of(self, role: str) -> EnginePlacement | RankPlacement:
        """Return the placement table of a role."""
        table: EnginePlacement | RankPlacement = self.roles[role] if role in self.roles else getattr(self, role)
        return table

    def home(self, role: str) -> str:
        """Return the role whose devices `role` uses: `role` itself if it has its own devices."""
        if role == "actor":
            return role
        share: str = self.of(role).share or SHARES[self.mode].get(role, "own")
        return role if share in ("own", role) else self.home(share)


class CheckpointTable(Options):
    """Checkpoints, from which a run resumes: when to write and how many to keep."""

    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: no regular checkpoints. A checkpoint is always written at the end and on Ctrl-C,
    SIGTERM, SIGHUP and `relax checkpoint`."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    background: bool = True
    """Write checkpoints during training, from a copy in host memory; false: training waits until the checkpoint is on
    disk. A run with a critic always waits."""
    grace_s: PositiveFloat = 60.0
    """Seconds after a stop (Ctrl-C) to finish the current step and save; a second Ctrl-C ends the run at once."""
    preemption_grace_s: PositiveFloat = 600.0
    """Like `grace_s`, for SIGHUP and for SIGTERM, which a scheduler sends before it takes the machine back. May exceed
    the scheduler's notice: a run that is killed earlier resumes from its last complete checkpoint."""


class ExportTable(Options):
    """Hugging Face folders of the model that a run writes while it trains."""

    every: NonNegativeInt = 0
    """Steps between exports to `exports/step-N`, which training waits for; 0: only the final model, `export/`."""
    keep: PositiveInt = 2
    """Number of newest exports in `exports/` to keep; older ones are deleted."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_defaults(cls, table: object) -> object:
        """Drop former keys with their defaults, which earlier versions wrote to the configuration of each run."""
        former = {"push_to": "", "push_timeout_s": 3600.0}
        if not isinstance(table, dict):
            return table
        return {key: table[key] for key in table if key not in former or table[key] != former[key]}


class ProfileTable(Options):
    """Profiles of the actor's and one engine's computing in chosen steps, in the run's folder `profile/`."""

    steps: tuple[PositiveInt, ...] = ()
    """Steps to profile, such as [3, 6]; empty: none. A profiled step is slower. The first steps are not typical."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Ranks of the actor to profile."""
    max_mb: PositiveInt = 200
    """Largest trace to keep of a rank and step, in MB; a larger trace is deleted, and only its table is kept."""


class RecoveryTable(Options):
    """Recovery from faults that the run could not repair in place."""

    restarts: NonNegativeInt = 3
    """Number of times in a row that the supervisor of a detached run resumes the run from its newest complete
    checkpoint after an infrastructure fault; a newer checkpoint resets the count. 0: the run ends at the first such
    fault. A wrong configuration, an error in a plugin's code and a requested stop are never retried."""


class RunTable(Options):
    """Name, labels, runner and environment variables of the run."""

    name: str = ""
    """Name of the run in reports and sinks; empty: derived from the configuration file's name."""
    tags: tuple[str, ...] = ()
    """Labels for finding the run."""
    notes: str = ""
    """Free text to show in the run's report."""
    runner: Literal["ray", "local", "inline"] = "local"
    """`local`: child processes of this process. `ray`: Ray Serve, on one or many machines.
    `inline`: everything in this process, for debuggers."""
    env: dict[str, Annotated[Secret | str, Field(union_mode="left_to_right")]] = {}
    """Environment variables of the workers; write credentials as `"env:NAME"` or `"file:PATH"`."""

    @field_validator("env")
    @classmethod
    def _no_literal_credentials(cls, env: dict[str, Secret | str]) -> dict[str, Secret | str]:
        for name, value in env.items():
            if isinstance(value, str) and CREDENTIALS & set(name.upper().split("_")):
                raise PydanticCustomError(LITERAL, f'write {name} as "env:NAME" or "file:PATH", never the value itself')
        return env

    def revealed_env(self) -> dict[str, str]:
        """Return the environment variables of the workers, with their secrets read."""
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in self.env.items()}
