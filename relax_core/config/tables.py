# SPDX-License-Identifier: Apache-2.0
"""Core tables: first those that define the experiment, then those that say how it is run and may change on resume.

Each means the same for every engine and trainer. The string under a field is its documentation:
the reference, the schema, `relax config explain` and `relax init` are made from it.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from relax_core.api.bus import LateRule
from relax_core.api.family import RoutingReplay, ToolCallFormat
from relax_core.api.options import LITERAL, Options, Secret
from relax_core.config.annotation import PathOrText

Format = Literal["float32", "bfloat16", "float16"]
HOST = re.compile(r"(\*\.)?\w([\w-]*\w)?(\.\w([\w-]*\w)?)*\.?")
CREDENTIALS = frozenset({"TOKEN", "SECRET", "PASSWORD", "KEY"})

Share = Literal["", "own", "actor", "rollout"]
SHARES: dict[str, dict[str, Share]] = {
    "colocate": {"rollout": "actor", "actor_fwd": "actor", "reference": "actor", "teacher": "actor",
                 "critic": "actor"},
    "hybrid": {"actor_fwd": "actor", "reference": "actor", "teacher": "actor", "critic": "actor"},
    "async": {},
}  # fmt: skip
"""Modes are presets: whose devices each role uses; one that is not named has its own."""


class Lora(Options):
    """Train low-rank adapters instead of all weights."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale: adapters count alpha / rank."""
    targets: tuple[str, ...] = ()
    """Modules whose linear layers get adapters, by the end of their names, such as `q_proj` or `layers.0.mlp`; `*` stands
    for anything. Empty: every linear layer of the language model except its head."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout before the adapters, while training only: trained log-probs then differ from sampled ones."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), which keeps high ranks learning (rsLoRA)."""
    dora: bool = False
    """Train the length of each weight's rows too (DoRA); published folded into whole weights."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters; published folded into whole weights."""
    export_adapter: bool = True
    """Beside the exported model, whose weights have the adapters folded in, write them in peft's own folder, `adapter`."""


class ModelTable(Options):
    """The policy that is trained."""

    path: Path
    """Folder of a Hugging Face model: config.json, weights, tokenizer.json."""
    dtype: Format = "float32"
    """Number format in which trainers compute, and engines where `rollout.dtype` names no other. The weights that are trained
    and their optimizer are float32 whatever it is."""
    tokenizer: Path | None = None
    """Folder of another tokenizer; absent: the model's own."""
    chat_template: PathOrText = ""
    """File that holds a Jinja chat template, or the template itself; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables of the chat template, such as `enable_thinking = false`."""
    tool_calls: ToolCallFormat = "auto"
    """Format in which the policy writes tool calls; `auto`: the one that its chat template shows."""
    lora: Lora | None = None
    """Adapters instead of all weights; absent: all weights are trained."""
    routing_replay: RoutingReplay = "off"
    """Of a mixture of experts: train tokens on the experts that they visited before. `rollout` takes the engine's choices
    (R3); `recompute` those of the trainer's own pass at the start of a step of several updates (R2)."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that stay as they are: names that its family gives (`vision`), or ends of module names, such as
    `embed_tokens` or `layers.0.*`; `*` stands for anything."""


class MediaSourcesTable(Options):
    """Hosts and folders that media of tasks and of environments may come from."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts that may be asked for media by URL, by name: `images.example.org`, or `*.example.org` for all below it. Empty: no
    URL is fetched. An address that is not public (private, loopback, link-local, ...) is connected to only where the
    address itself, or its network such as `10.1.0.0/16`, is named here, also where an allowed name resolves to it."""
    allowed_folders: tuple[Path, ...] = ()
    """Folders below which paths and `file:` URLs may lead, links followed, beside the folder of the data file itself."""
    fetch_timeout_s: PositiveFloat = 20.0
    """Longest time for one URL, redirects included; the `timeout_s` of a processor bounds it too."""

    @field_validator("allowed_hosts")
    @classmethod
    def _names_of_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            try:
                ip_network(host, strict=False)
            except ValueError as error:
                if HOST.fullmatch(host):
                    continue
                fix = "write its name alone, `images.example.org`, `*.example.org` for all below it, or an address"
                raise PydanticCustomError(
                    "host", "{host} is no host; {fix}", {"host": repr(host), "fix": fix}
                ) from error
        return hosts


class DataTable(Options):
    """The tasks that are trained on."""

    train: Path
    """Task file: one JSON object a line with `prompt` (text or messages) and, where rewards need it, `answer`."""
    columns: dict[str, str] = {}
    """Renames, `{prompt = "question"}` where the file calls it otherwise."""
    system_prompt: str = ""
    """Put before every chat prompt that has no system message of its own."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; absent: what the model's context leaves beside `rollout.max_new_tokens`."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """A task with a longer prompt: `skip` it, counted and reported, `truncate` its beginning, or refuse to start. A row of
    a dataset is cut at its end."""
    max_row_tokens: PositiveInt | None = None
    """Longest row of a dataset, prompt and completion together; absent: the model's context."""
    train_on: Literal["completion", "all"] = "completion"
    """Which tokens of a dataset's row are trained: its completion (of a conversation, every turn of the assistant), or
    `all`, the prompt too."""
    shuffle: bool = True
    """Seeded order, another one each epoch; false: the order of the file."""
    media: MediaSourcesTable = MediaSourcesTable()
    """Hosts and folders that media may come from."""


class TeacherTable(Options):
    """Models that the policy learns from, where the algorithm asks for a teacher; each task has exactly one."""

    path: Path | None = None
    """Folder of a Hugging Face model with the policy's tokenizer, which a trainer runs forward."""
    engine: str = ""
    """Instead of a folder: the pool of `[[engines]]` that scores the rows. It gives log-probs of the tokens that the policy
    sampled, and no others."""
    only: str = Field("", pattern=r"^$|^[^=]+=")
    """Teaches only tasks in which a column has this value, `domain=maths`; a dot goes into a table of the column. Empty:
    all tasks."""
    dtype: Literal["", Format] = ""
    """Number format of its weights; empty: that of `model.dtype`. A pool has its own."""


class EngineTable(Options):
    """Engines beside the policy's, for rewards, environments and teachers that ask another model."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """What rewards, environments and teachers call it, such as `judge`."""
    path: Path
    """Folder of its Hugging Face model; the weights stay as they are there."""
    engine: dict[str, Any] = {}
    """Engine: a name, or a table with a name, `python` and its options. Empty: as `[engine]` says."""
    count: PositiveInt = 1
    """Engine processes."""
    devices: Literal["own", "shared", "deferred"] = "own"
    """Devices of its `own`; or those of the policy's engines, in turns. `shared`: its turn comes when `turn_requests` wait, or
    when the policy's engines have nothing to do. `deferred`: only when they have nothing to do, at the end of a wave of
    samples. In both it comes after `turn_wait_s` at the latest. A pool that a teacher asks answers for whole steps."""
    turn_requests: PositiveInt = 64
    """Requests that make a `shared` pool take its turn while the policy's engines are at work."""
    turn_wait_s: PositiveFloat = 300.0
    """Longest time that a request waits for the pool's turn while the policy's engines have theirs. Waiting for a turn does
    not count against `timeout_s`, and lasts no longer than `rollout.step_timeout_s`."""
    max_context: NonNegativeInt = 0
    """Most tokens of prompt and completion together; 0: the model's context."""
    dtype: Literal["", Format] = ""
    """Number format of its weights; empty: that of `model.dtype`."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one request, from when it is asked; who asks may set a shorter one."""
    tokenizer: Path | None = None
    """Folder of another tokenizer; absent: the model's own."""
    chat_template: PathOrText = ""
    """File that holds a Jinja chat template, or the template itself; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables of the chat template, such as `enable_thinking = false`."""
    gpus_per_engine: NonNegativeFloat | None = None
    """Devices of one engine; 0: none; absent: 1 where there are any."""
    threads: NonNegativeInt = 0
    """CPU threads of one engine; 0: an equal share of the cores."""
    requests_per_engine: PositiveInt = 256
    """Requests that one engine is given at once; others wait for the first engine that has room."""
    silence_s: PositiveFloat = 20.0
    """An engine that does not answer for so long is asked whether it lives; one that does not say so in as long is replaced."""


class RolloutTable(Options):
    """Generation of samples."""

    prompts_per_step: PositiveInt = 32
    """Tasks in one step; each becomes a group. From a dataset: rows, or pairs, in one step."""
    group_size: PositiveInt = 8
    """Samples of one task."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of one turn of the policy."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; training divides the logits by it too."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling; 1 samples the policy itself."""
    dtype: Literal["", Format] = ""
    """Number format of the engines' weights and caches, and so of what is published to them; empty: `model.dtype`."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides the model's own end tokens."""
    max_turns: PositiveInt = 32
    """Most turns of the policy in one sample."""
    token_budget: PositiveInt | None = None
    """Most tokens of one sample, prompt and observations included; absent: the model's context."""
    late: LateRule = "wait"
    """What happens to groups that would miss the staleness bound: `wait` for them, or `mask`, `drop`, `regenerate`."""
    spare_groups: NonNegativeInt = 0
    """Groups generated beyond those of a step, so that it need not wait for the slowest: those that end last are dropped.
    Long answers end last, so the policy sees fewer of them."""
    refill_limit: NonNegativeInt = 20
    """Steps' worth of groups in a row that filters may reject and others replace before the run stops; 0: any number."""
    kv_across_versions: bool = False
    """Samples under way keep their KV cache when new weights arrive: faster, and their tokens count as old as the cache.
    Needs `max_staleness` of 1 or more. False: caches are computed again."""
    media_store_mb: PositiveInt = 65536
    """Processed media that are kept in the run directory, in MB. Over it, those that no group needs any more are deleted, the
    least recently used first, and processed again when they are needed again. What is needed stays, also over it."""
    turn_timeout_s: PositiveFloat = 3600.0
    """Deadline of one turn of the policy, from when it is asked; it stands still while the engines are paused. Then the
    sample ends as `engine_timeout`, which is never judged."""
    step_timeout_s: PositiveFloat = 3600.0
    """Deadline of a step: it is closed short then, with what is ready; where nothing is, those that it waits for are let go."""


class OptimizerTable(Options):
    """AdamW, the same for every trainer."""

    lr: PositiveFloat = 1e-6
    """Learning rate at its height."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the rate after the warm-up; `linear` and `cosine` end at 0 with the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the rate rises from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient norm; 0: no clipping."""
    not_finite: Literal["skip", "roll-back", "stop"] = "skip"
    """An update whose loss or gradient is NaN or infinite is never applied: `skip` it, and go on with the next rows; start
    the trainer again from its last checkpoint (`roll-back`; one that comes out the same again is skipped); or `stop` the
    run. Several in a row stop it anyway."""


class CriticTable(Options):
    """The model whose values an algorithm subtracts; the rest of its optimizer is `[optimizer]`."""

    path: Path | None = None
    """Folder of the model that it starts from, such as a reward model; absent: that of the policy, its head all zeros."""
    lr: PositiveFloat | None = None
    """Learning rate at its height; absent: that of the policy."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is trained and the policy stays as it is."""


class BatchTable(Options):
    """The way from a step's samples to optimizer updates."""

    updates_per_step: PositiveInt = 1
    """Optimizer updates a step; more than 1 trains later ones on a policy that has moved since sampling."""
    tokens_per_micro_batch: NonNegativeInt = 0
    """Most tokens of one forward and backward; 0: the trainer's own choice. Results do not depend on it."""
    stream: bool = True
    """Train on the first groups of a step while its others are still being generated, where algorithm, trainer and
    placement allow it; the update is that of all rows. False: each step waits for all of them."""


class EvalSetTable(Options):
    """One evaluation set; what is absent is taken from `[eval]`."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Its name in metrics, `eval/<name>/mean`."""
    path: Path
    """Task file."""
    columns: dict[str, str] = {}
    """Renames, as in `[data]`."""
    samples: PositiveInt | None = None
    """Samples of each task."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy."""
    size: PositiveInt | None = None
    """Most tasks of the file; absent: all."""


class EvalTable(Options):
    """Evaluation: its own seeds, never any influence on training."""

    every: NonNegativeInt = 20
    """Steps between evaluations, and once at the end; 0: none at all."""
    at_start: bool = True
    """Also before the first step."""
    samples: PositiveInt = 1
    """Samples of each task."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature, 0 is greedy; absent: as in training."""
    size: PositiveInt = 128
    """Tasks held out of the training file where there are no `[[eval.sets]]`."""
    sets: tuple[EvalSetTable, ...] = ()
    """Evaluation sets."""


class EnginePlacement(Options):
    """Devices of the engines."""

    engines: PositiveInt = 1
    """Engine processes."""
    gpus_per_engine: NonNegativeFloat | None = None
    """Devices of one engine; 0: none; absent: where there are any, as many as the engine's options spread it over."""
    threads: NonNegativeInt = 0
    """CPU threads of one engine; 0: an equal share of the cores."""
    share: Share = ""
    """Whose devices the engines use, in turns: a role's, or `own`; empty: as the mode says."""
    requests_per_engine: PositiveInt = 1024
    """Requests that one engine is given at once; others wait for the first engine that has room."""
    backlog: PositiveInt = 1024
    """Requests that may wait beyond those that the engines run; while it is full turns wait, too. No group is begun while as
    many wait as run."""
    sessions: PositiveInt | None = None
    """Samples that may be in play at once, those that wait for tools included: groups are begun while engines have room and the
    staleness bound grants more. Absent: as many as it grants, without one two steps' worth."""
    prelaunch: NonNegativeInt = 0
    """Samples beyond those in play whose environments are started already, in whole groups, before engines have room for
    them or the staleness bound grants them: nothing is sampled until it does. Not in deterministic runs."""
    kv_tokens_per_engine: NonNegativeInt | None = None
    """Tokens that the KV cache of one engine holds: running requests are given to it while they fit beside each other, and
    what sessions between two turns left there is kept while others have room. 0: not counted; absent: as the engine says."""
    kv_reserve: float = Field(0.25, ge=0.0, le=1.0)
    """Share of the tokens which running requests may still sample that is counted as held. 1: no engine is ever given more than
    its cache holds; less: more run at once, and where many turns get long an engine computes caches again."""
    silence_s: PositiveFloat = 20.0
    """An engine that does not answer for so long is asked whether it lives; one that does not say so in as long is replaced."""


class RankPlacement(Options):
    """Devices of the ranks of a training role."""

    ranks: PositiveInt = 1
    """Processes."""
    gpus_per_rank: NonNegativeFloat | None = None
    """Devices of one rank; 0: none; absent: 1 where there are any."""
    threads: NonNegativeInt = 0
    """CPU threads of one rank; 0: an equal share of the cores."""
    share: Share = ""
    """Whose devices the ranks use, in turns: a role's, or `own`; empty: as the mode says. The actor has its own."""


class RolePlacement(RankPlacement):
    """Devices of the ranks of a plugin's role, and their model."""

    path: Path | None = None
    """Folder of the role's model; absent: the run's."""


class PlacementTable(Options):
    """The placement of roles on devices; `placement = "async"` is short for the mode alone."""

    mode: Literal["colocate", "hybrid", "async"] = "colocate"
    """`colocate`: rollout and trainer take turns on the same devices; `hybrid`: rollout has its own;
    `async`: the forward roles have their own too."""
    rollout: EnginePlacement = EnginePlacement()
    """Engines."""
    actor: RankPlacement = RankPlacement()
    """Ranks that train the policy."""
    actor_fwd: RankPlacement = RankPlacement()
    """Ranks that compute log-probs under the step's starting weights; on the actor's devices it does so itself."""
    reference: RankPlacement = RankPlacement()
    """Ranks that compute log-probs under the reference."""
    critic: RankPlacement = RankPlacement()
    """Ranks that train the critic and compute values."""
    teacher: RankPlacement = RankPlacement()
    """Ranks of each teacher; several teachers take turns on the same devices."""
    roles: dict[str, RolePlacement] = {}
    """Ranks of roles that plugins bring, by the role's name."""
    check_memory: bool = True
    """Refuse at the start what surely can't fit into the memory that is free; `--anyway` is short for false."""

    def of(self, role: str) -> EnginePlacement | RankPlacement:
        """The table of a role."""
        table: EnginePlacement | RankPlacement = self.roles[role] if role in self.roles else getattr(self, role)
        return table

    def home(self, role: str) -> str:
        """The role whose devices a role is on: its own name where they are its own."""
        if role == "actor":
            return role
        share: str = self.of(role).share or SHARES[self.mode].get(role, "own")
        return role if share in ("own", role) else self.home(share)


class CheckpointTable(Options):
    """Checkpoints, which a run continues from: how often they are written and how many are kept."""

    every: NonNegativeInt = 50
    """Steps between checkpoints, and one at the end, at Ctrl-C, SIGTERM, SIGHUP and `relax checkpoint`; 0: only those."""
    keep: PositiveInt = 2
    """Checkpoints kept; older ones are deleted."""
    background: bool = True
    """Write them while training goes on, from a copy in the host's memory; false: training waits until they are on disk.
    With a critic it always waits."""
    grace_s: PositiveFloat = 60.0
    """Seconds that a stop (Ctrl-C) gives to end the step under way and to save; a second Ctrl-C ends the run at once."""
    preemption_grace_s: PositiveFloat = 600.0
    """The same for SIGTERM, by which a scheduler announces that it takes the machine back, and for SIGHUP. Whatever it then
    kills has its last whole checkpoint, so this may be longer than the notice."""


class RecoveryTable(Options):
    """Recovery from faults that could not be repaired in place."""

    restarts: NonNegativeInt = 3
    """Times in a row that the supervisor of a detached run resumes it after a fault of the infrastructure, from the newest
    whole checkpoint; a newer checkpoint gives them back. 0: the run ends at its first such fault. A wrong configuration, an
    error in a plugin's code and a stop are never retried."""


class RunTable(Options):
    """The run's name and surroundings."""

    name: str = ""
    """Shown in reports and sinks; empty: from the file's name."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""
    notes: str = ""
    """Free text for the report."""
    runner: Literal["ray", "local", "inline"] = "local"
    """`local`: child processes of this one; `ray`: Ray Serve, on one machine or many;
    `inline`: all in this process, for debuggers."""
    env: dict[str, Annotated[Secret | str, Field(union_mode="left_to_right")]] = {}
    """Environment variables of the workers; credentials as `"env:NAME"` or `"file:PATH"`."""

    @field_validator("env")
    @classmethod
    def _no_literal_credentials(cls, env: dict[str, Secret | str]) -> dict[str, Secret | str]:
        for name, value in env.items():
            if isinstance(value, str) and CREDENTIALS & set(name.upper().split("_")):
                raise PydanticCustomError(LITERAL, f'write {name} as "env:NAME" or "file:PATH", never the value itself')
        return env

    def revealed_env(self) -> dict[str, str]:
        """The variables with their secrets read, for the process that gets them."""
        return {name: value.reveal() if isinstance(value, Secret) else value for name, value in self.env.items()}


NoticeKind = Literal["start", "stall", "divergence", "recovery", "end"]


class NotifyTable(Options):
    """The addresses that are told what a run needs a person for, and of which events."""

    urls: tuple[Secret, ...] = ()
    """Apprise addresses, each as `"env:NAME"` or `"file:PATH"`: they hold credentials."""
    events: tuple[NoticeKind, ...] = ("start", "stall", "divergence", "recovery", "end")
    """Kinds of messages: the run's `start`; a wait beyond its deadline or `stall_s` (`stall`); a guard that fired
    (`divergence`); roles, workers and the run itself that are replaced, go back or work again (`recovery`); its `end`, with the
    reason."""
    burst: PositiveInt = 5
    """Messages that may come at once; each gives its place back `every_s` later. Others are left out and summed up in the next
    message. The start, a guard that holds, undoes or stops the run, and the end are always told."""
    every_s: PositiveFloat = 300.0
    """Seconds after which one more message may come."""
    stall_s: PositiveFloat = 3600.0
    """Longest time that a role may wait for one thing before a message says so."""
    timeout_s: PositiveFloat = 15.0
    """Deadline of a message to one address; one that takes longer is given up, and the others go on."""
    samples: bool = False
    """Quote what errors of plugins say and a sample of a step that a guard stopped at: they may hold texts of tasks and
    of the policy. False: messages hold none."""
