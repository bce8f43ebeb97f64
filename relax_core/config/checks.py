# SPDX-License-Identifier: Apache-2.0
"""Checks before a run starts: combinations of keys that cannot work, and files that cannot be used.

Checks of combinations read class attributes of components (`min_group_size`, `max_staleness`, `gives_reward`). Only the
tables of plugins are asked for further `problems`. Checks of files read model folders, vocabularies and tokenizers.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, cast

from relax_core.api.algorithm import Algorithm, Source
from relax_core.api.engine import Engine, switched_off
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.modality import ModalityProcessor
from relax_core.api.model_folder import context_reason, folder_errors, model_context, vocabulary_size
from relax_core.api.trainer import Trainer
from relax_core.api.weights import WeightTransport
from relax_core.config.run_config import DEFAULT_NAMES, EnvironmentKeys, RunConfig
from relax_core.config.tables import CriticTable, EngineTable, RankPlacement
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.error_text import authored

Errors: TypeAlias = Iterator[ConfigError]
TEACHER_COLUMNS = frozenset(
    {"teacher_log_probs", "teacher_top_k_ids", "teacher_top_k_log_probs", "teacher_log_probs_at", "student_top_k_ids"}
)
"""Columns that only a teacher fills."""

MAX_PORT = 65535
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_NAME = re.compile(rf"([-a-z0-9.]+/)?{LABEL_VALUE.pattern}")
RESERVED_REWARDS = frozenset({"mean", "std", "greedy", "environment"})
"""Names of metrics `reward/<name>` that the core logs itself."""


def combination_errors(config: RunConfig, catalogue: Catalogue) -> list[ConfigError]:
    """Return an error for every combination that cannot work."""
    algorithms = {
        choice.name: cast(type[Algorithm], catalogue.target("algorithm", choice.name)) for choice in config.algorithms
    }
    algorithm = algorithms[config.algorithm.name]
    generated = algorithm.source is Source.ROLLOUT
    return [
        *_sampling_errors(config, algorithms, generated),
        *_environment_errors(config, catalogue, algorithms),
        *_engine_errors(config, catalogue, generated),
        *_pool_errors(config),
        *_batch_errors(config, generated),
        *_guard_errors(config, generated),
        *_reward_errors(config, catalogue, algorithms, generated),
        *_sink_errors(config),
        *_placement_errors(config, algorithm),
        *_autoscale_errors(config, catalogue, generated),
        *_external_errors(config, catalogue, generated),
        *_label_errors(config),
        *_ignored_errors(config),
        *_plugin_table_errors(config),
    ]


def _plugin_table_errors(config: RunConfig) -> Errors:
    """Yield the errors that plugins' tables find in the whole configuration; only tables that are set are asked."""
    data = config.dump() if config.plugin_tables else {}
    for name, table in config.plugin_tables.items():
        with authored(f"table {name!r}"):
            yield from table.problems(data)


def samples(config: RunConfig, catalogue: Catalogue) -> bool:
    """Return True if the run generates the samples that it trains on."""
    return cast(type[Algorithm], catalogue.target("algorithm", config.algorithm.name)).source is Source.ROLLOUT


def _sampling_errors(config: RunConfig, algorithms: dict[str, type[Algorithm]], generated: bool) -> Errors:
    """Refuse small groups, and more staleness or updates per step than an algorithm tolerates."""
    if generated:
        for name, algorithm in algorithms.items():
            if config.rollout.group_size < algorithm.min_group_size:
                fix = f"{name} compares the samples of a task: set {algorithm.min_group_size} or more"
                yield ConfigError("rollout.group_size", config.rollout.group_size, fix)
        for name, algorithm in algorithms.items():
            most = algorithm.max_staleness
            if most is not None and (config.staleness is None or config.staleness > most):
                fix = f"{name} is only correct up to a staleness of {most}: set max_staleness = {most}"
                yield ConfigError("max_staleness", config.max_staleness, fix)
            updates = algorithm.max_updates_per_step
            if updates is not None and config.batch.updates > updates:
                key = "updates_per_step" if config.batch.updates_per_step > updates else "passes"
                fix = (
                    f"{name} is only correct with up to {updates} updates per step: set {updates}, or use an algorithm"
                )
                fix = f"{fix} with a ratio, such as grpo"
                yield ConfigError(f"batch.{key}", getattr(config.batch, key), fix)
    elif config.batch.passes > 1:
        fix = f"{config.algorithm.name} has no ratio that bounds later updates: set 1; more steps repeat the file"
        yield ConfigError("batch.passes", config.batch.passes, fix)
    if config.deterministic and config.max_staleness != 0:
        yield ConfigError("max_staleness", config.max_staleness, "deterministic = true needs max_staleness = 0")


def _environment_errors(config: RunConfig, catalogue: Catalogue, algorithms: dict[str, type[Algorithm]]) -> Errors:
    """Refuse duplicate names, process options of in-process environments, and algorithms that do not combine."""
    tables = {
        "environment": config.environment,
        **{f"environments.{index}": environment for index, environment in enumerate(config.environments)},
    }
    for key, choice in tables.items():
        if (
            choice.isolation == "auto"
            and cast(type[Environment], catalogue.target("environment", choice.name)).in_process
        ):
            for name in ("workers", "memory_mb", "retries", "inherit_env", "writable"):
                if getattr(choice, name) != EnvironmentKeys.model_fields[name].default:
                    fix = f'{choice.name} has no process of its own: remove this key, or set {key}.isolation = "shared"'
                    yield ConfigError(f"{key}.{name}", getattr(choice, name), fix)
    names = [config.environment.known_as, *(environment.known_as for environment in config.environments)]
    first = algorithms[config.algorithm.name]
    for index, environment in enumerate(config.environments):
        if environment.known_as in names[: index + 1]:
            fix = "tasks select environments by name: give one of the two another label, or remove it"
            yield ConfigError(
                f"environments.{index}.{'label' if environment.label else 'name'}", repr(environment.known_as), fix
            )
        if environment.learner is None:
            continue
        learner, fix = algorithms[environment.learner.name], ""
        if first.source is not Source.ROLLOUT or learner.source is not Source.ROLLOUT:
            fix = "one of the algorithms does not train on generated samples: choose two that do, or remove this key"
        elif set(learner.fits) != set(first.fits):
            fix = "only one algorithm trains a critic, which values all rows: choose two that both do, or neither"
        elif learner.greedy_baseline != first.greedy_baseline:
            fix = "only one algorithm adds a greedy sample to each group: choose two that both do, or neither"
        if fix:
            got = f"{environment.learner.name} with the run's algorithm {config.algorithm.name}"
            yield ConfigError(f"environments.{index}.algorithm", got, fix)


def _engine_errors(config: RunConfig, catalogue: Catalogue, generated: bool) -> Errors:
    """Refuse KV settings, media, weight transports, payloads and proofs that the engine does not support."""
    name, weights, proof = config.engine.name, config.weights, config.weights.proof
    engine = cast(type[Engine], catalogue.target("engine", name))
    can, transport = (
        engine.capabilities,
        cast(type[WeightTransport], catalogue.target("weight-transport", weights.name)),
    )
    if config.rollout.kv_across_versions and config.max_staleness == 0:
        fix = "tokens become older than max_staleness = 0 allows: set max_staleness = 1 or more, or remove this key"
        yield ConfigError("rollout.kv_across_versions", True, fix)
    if config.rollout.kv_across_versions and not can.keeps_kv_across_versions:
        fix = f"engine {name} recomputes its KV cache after every weight update: set this key to false"
        yield ConfigError("rollout.kv_across_versions", True, fix)
    able = sorted(can.transports)
    if weights.name.rpartition(":")[2] not in able:
        fix = f"choose a transport that engine {name} supports: {', '.join(able) or 'none while the engine runs'}"
        yield ConfigError("weights.name", weights.name, fix)
    if weights.payload not in transport.payloads:
        fix = f"choose a payload that transport {weights.name} supports: {', '.join(sorted(transport.payloads))}"
        yield ConfigError("weights.payload", weights.payload, fix)
    if weights.payload == "delta" and not can.delta:
        yield ConfigError("weights.payload", "delta", f'engine {name} loads only full versions: use "full"')
    elif weights.payload == "delta" and (switch := switched_off(engine, "delta", config.engine.chosen.options)):
        fix = f'engine {name} keeps no base to apply deltas to: set engine.{switch} = true, or use "full"'
        yield ConfigError("weights.payload", "delta", fix)
    trainer = cast(type[Trainer], catalogue.target("trainer", config.trainer.name))
    if transport.live and trainer.transfer is Trainer.transfer:  # a live transport needs `transfer`
        fix = f'trainer {config.trainer.name} cannot send live weights: use a stored transport, such as "shared-memory"'
        yield ConfigError("weights.name", weights.name, fix)
    if proof == "behaviour" and not can.score:
        yield ConfigError("weights.proof", proof, f'engine {name} cannot score given tokens: use "auto"')
    if proof == "resident" and can.receipts == "wire":
        yield ConfigError("weights.proof", proof, f'engine {name} cannot check the weights in its memory: use "auto"')
    if config.media:
        yield from catalogue.lacking("relax_media_pipeline", "media", ", ".join(choice.name for choice in config.media))
    by_kind: dict[str, str] = {}
    for index, choice in enumerate(config.media):
        kind = cast(type[ModalityProcessor], catalogue.target("modality-processor", choice.name)).medium
        if kind in by_kind:
            yield ConfigError(f"media.{index}.name", choice.name, f"{by_kind[kind]} already reads {kind}: remove one")
        if generated and kind not in can.media:
            engines = {
                engine_name: cast(type[Engine], catalogue.target("engine", engine_name))
                for engine_name in catalogue.names("engine")
            }
            others = " or ".join(
                engine_name for engine_name, other in engines.items() if kind in other.capabilities.media
            )
            takes = ", ".join(sorted(can.media)) or "text only"
            fix = f"engine {name} accepts {takes}: use {others or 'another engine'}, or remove this processor"
            yield ConfigError(f"media.{index}.name", choice.name, fix)
        by_kind[kind] = choice.name


def _pool_errors(config: RunConfig) -> Errors:
    """Refuse pools with the same name, turn options without effect, and teachers with no model or two models."""
    names = [pool.name for pool in config.engines]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield ConfigError(f"engines.{index}.name", name, "another pool has this name: give each pool its own name")
    taught = {teacher.engine for teacher in config.teachers}
    for index, pool in enumerate(config.engines):
        uses = {"shared": ("turn_requests", "turn_wait_s"), "deferred": ("turn_wait_s",)}.get(pool.devices, ())
        for key in ("turn_requests", "turn_wait_s"):
            if getattr(pool, key) != EngineTable.model_fields[key].default and (key not in uses or pool.name in taught):
                of = "a pool that a teacher uses" if pool.name in taught else f'devices = "{pool.devices}"'
                yield ConfigError(
                    f"engines.{index}.{key}", f"{getattr(pool, key)} with {of}", "remove this key: it has no effect"
                )
    for index, teacher in enumerate(config.teachers):
        key = f"teachers.{index}"
        if not teacher.engine and teacher.path is None:
            yield ConfigError(key, "neither path nor engine", 'set path = "FOLDER" or engine = "POOL"')
        if teacher.engine and teacher.path is not None:
            yield ConfigError(f"{key}.path", f"{teacher.path} and engine = {teacher.engine!r}", "remove one of the two")
        if teacher.engine and teacher.dtype:
            yield ConfigError(f"{key}.dtype", teacher.dtype, f"set it in the pool {teacher.engine} of [[engines]]")
        if teacher.engine and teacher.engine not in names:
            yield ConfigError(f"{key}.engine", repr(teacher.engine), no_pool(config))


def no_pool(config: RunConfig) -> str:
    """Return the fix for a pool name that no `[[engines]]` table defines."""
    names = ", ".join(pool.name for pool in config.engines)
    return f"the pools of [[engines]] are {names}" if names else "add a pool: [[engines]] with name and path"


def _batch_errors(config: RunConfig, generated: bool) -> Errors:
    """Refuse updates of less than one group, micro-batches smaller than a row, and more ranks than rows."""
    rollout, batch, ranks = config.rollout, config.batch, config.placement.actor.ranks
    if batch.updates_per_step > rollout.groups_per_step:
        most = rollout.groups_per_step
        fix = f"a step has rollout.groups_per_step = {most} groups: set {most} or less"
        yield ConfigError("batch.updates_per_step", batch.updates_per_step, fix)
    if not generated:
        return
    longest = rollout.max_new_tokens + (config.data.max_prompt_tokens or 1)
    if 0 < batch.tokens_per_micro_batch < longest:
        fix = f"a row has up to {longest} tokens (rollout.max_new_tokens and a prompt): set {longest} or more, or 0"
        yield ConfigError("batch.tokens_per_micro_batch", batch.tokens_per_micro_batch, fix)
    rows = rollout.groups_per_step * rollout.group_size // batch.updates_per_step
    if ranks > rows > 0:
        fix = f"an update has only {rows} rows, and every rank needs a row: set {rows} or less"
        yield ConfigError("placement.actor.ranks", ranks, fix)


def _guard_errors(config: RunConfig, generated: bool) -> Errors:
    """Refuse settings of guards that check sampling metrics in a run that trains on a dataset."""
    for name in () if generated else ("rollout_kl", "reward", "mismatch"):
        guard = getattr(config.guards, name)
        if guard != type(guard)():
            fix = f"{config.algorithm.name} trains on the rows of a dataset and samples nothing: remove this guard"
            yield ConfigError(f"guards.{name}", f"a guard on {guard.metric}", fix)


def _reward_errors(
    config: RunConfig, catalogue: Catalogue, algorithms: dict[str, type[Algorithm]], generated: bool
) -> Errors:
    """Refuse samples without a reward, duplicate names, and evaluations that repeat a greedy sample."""
    environments = [config.environment.name, *(choice.name for choice in config.environments)]
    targets = {name: cast(type[Environment], catalogue.target("environment", name)) for name in environments}
    silent = [name for name in environments if not targets[name].gives_reward]
    judged = config.rewards or not silent or not any(each.reads_rewards for each in algorithms.values())
    if generated and not judged:
        names = ", ".join(catalogue.names("reward")) or "none is installed"
        fix = f'environment {silent[0]} gives no reward: set rewards = ["NAME"] ({names})'
        yield ConfigError("rewards", "nothing", fix)
    if config.rewards and all(reward.weight == 0 for reward in config.rewards):
        yield ConfigError("rewards.0.weight", 0.0, "all weights are 0: set another weight for at least one reward")
    called = [reward.known_as for reward in config.rewards]
    for index, (reward, name) in enumerate(zip(config.rewards, called, strict=True)):
        key = f"rewards.{index}.{'label' if reward.label else 'name'}"
        if name in called[:index]:
            yield ConfigError(key, f"a second {name!r}", "rewards are logged by name: give one of the two a label")
        if name in RESERVED_REWARDS:
            yield ConfigError(key, repr(name), f"reward/{name} is a metric of the core: give this reward another label")
    table = config.eval
    for name, count in Counter(eval_set.name for eval_set in table.sets).items():
        if count > 1:
            yield ConfigError("eval.sets", f"{count} sets named {name!r}", "give each set its own name")
    plans = [] if table.sets else [("eval", table.temperature, table.samples)]
    for index, eval_set in enumerate(table.sets):
        temperature = table.temperature if eval_set.temperature is None else eval_set.temperature
        plans.append((f"eval.sets.{index}", temperature, eval_set.samples or table.samples))
    for key, temperature, number in plans:
        if temperature == 0 and number > 1:
            fix = "temperature 0 gives the same sample each time: set samples = 1"
            yield ConfigError(f"{key}.samples", number, fix)


def _sink_errors(config: RunConfig) -> Errors:
    """Refuse a second table of a sink, which would replace the first."""
    names = [sink.name for sink in config.sinks]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield ConfigError(f"sinks.{index}.name", f"a second {name!r}", "remove one of the two tables")


def _placement_errors(config: RunConfig, algorithm: type[Algorithm]) -> Errors:
    """Refuse a token budget below one turn, an actor on another role's devices, and settings without effect."""
    budget, placement = config.rollout.token_budget, config.placement
    if budget is not None and budget < config.rollout.max_new_tokens:
        fix = f"set at least rollout.max_new_tokens = {config.rollout.max_new_tokens}"
        yield ConfigError("rollout.token_budget", budget, fix)
    least, engines = placement.rollout.min_engines, placement.rollout.engines
    if least is not None and least > engines:
        fix = f"a run begins with placement.rollout.engines = {engines}: set at most as many"
        yield ConfigError("placement.rollout.min_engines", least, fix)
    if placement.actor.share not in ("", "own"):
        fix = 'other roles use the actor\'s devices: remove this key, or set placement.rollout.share = "actor"'
        yield ConfigError("placement.actor.share", repr(placement.actor.share), fix)
    elif (
        placement.actor_fwd != RankPlacement(share=placement.actor_fwd.share)
        and placement.home("actor_fwd") == "actor"
        and not config.teachers  # a teacher may need its own pass
    ):
        fix = 'on the actor\'s devices the actor does this work itself: remove this table, or set share = "own"'
        yield ConfigError("placement.actor_fwd", "ranks of its own", fix)
    if "critic" not in algorithm.fits:
        fix = f"{config.algorithm.name} trains no critic: remove this table, or choose an algorithm like ppo"
        if config.critic != CriticTable():
            yield ConfigError("critic", ", ".join(sorted(config.critic.model_fields_set)), fix)
        if placement.critic != RankPlacement():
            yield ConfigError("placement.critic", "ranks of its own", fix)


def _autoscale_errors(config: RunConfig, catalogue: Catalogue, generated: bool) -> Errors:
    """Refuse a scaling policy without engines, and a start outside of its limits; the planner checks the devices."""
    table, engines = config.autoscale, config.placement.rollout.engines
    if table is None:
        return
    if not generated:
        fix = f"{config.algorithm.name} trains on the rows of a dataset, without engines: remove this table"
        yield ConfigError("autoscale.name", table.name, fix)
    yield from catalogue.lacking("relax_autoscaler", "autoscale", table.name)
    if engines > table.max_engines:
        fix = f"the scaling policy keeps at most autoscale.max_engines = {table.max_engines}: set at most as many"
        yield ConfigError("placement.rollout.engines", engines, fix)


def _external_errors(config: RunConfig, catalogue: Catalogue, generated: bool) -> Errors:
    """Refuse engines from elsewhere that could not prove their weights, and addresses that can't be called."""
    key, external, weights = "placement.rollout.external", config.placement.rollout.external, config.weights
    if not external.addresses:
        if external.token is not None:
            yield ConfigError(f"{key}.token", "a token without addresses", f"set {key}.addresses, or remove the token")
        return
    if not generated:
        fix = "a run on given rows has no engines: remove this table"
        yield ConfigError(key, f"a table, with algorithm {config.algorithm.name}", fix)
    yield from catalogue.lacking("relax_external_workers", f"{key}.addresses", ", ".join(external.addresses))
    if external.token is None:
        fix = f'set {key}.token = "file:PATH": engines accept only a caller with their token'
        yield ConfigError(f"{key}.token", "nothing", fix)
    for index, address in enumerate(external.addresses):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
            yield ConfigError(f"{key}.addresses.{index}", repr(address), "give HOST:PORT, such as 127.0.0.1:8701")
        elif weights.name == "shared-memory" and not is_loopback(host):
            fix = f'only engines of this machine can read them: set weights.name = "disk" or "http" for {address}'
            yield ConfigError("weights.name", weights.name, fix)
    if weights.proof != "behaviour":
        fix = f'set "behaviour", so that engines at {key}.addresses prove their weights by a canary'
        yield ConfigError("weights.proof", weights.proof, fix)


def _label_errors(config: RunConfig) -> Errors:
    """Refuse node labels that have no effect, or that Ray would read as something else than a label."""
    key, labels = "placement.elastic_labels", config.placement.elastic_labels
    if labels and config.run.runner != "ray":
        fix = 'only Ray has nodes with labels: remove the key, or set run.runner = "ray"'
        yield ConfigError(key, f"labels, with the runner {config.run.runner!r}", fix)
    for name, value in labels.items():
        if not (LABEL_NAME.fullmatch(name) and LABEL_VALUE.fullmatch(value)):
            fix = "give names and values as in `ray start --labels`: letters, digits, '-', '_' and '.', up to 63"
            yield ConfigError(key, f"{name!r} = {value!r}", fix)


def is_loopback(host: str) -> bool:
    """Return True for an address or name that only processes of this machine reach."""
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _ignored_errors(config: RunConfig) -> Errors:
    """Refuse a sampler if `data.shuffle = false`, which reads tasks in the order of the file."""
    if not config.data.shuffle and config.sampler.name != DEFAULT_NAMES["sampler"]:
        fix = f"the order of the file replaces the sampler {config.sampler.name}: remove this key, or [sampler]"
        yield ConfigError("data.shuffle", False, fix)


def file_errors(config: RunConfig, catalogue: Catalogue) -> list[ConfigError]:
    """Return an error for every missing or broken file, and for sample lengths beyond the model's context."""
    return [
        *_path_errors(config),
        *(_context_errors(config) if samples(config, catalogue) else ()),
        *_pool_file_errors(config),
        *_teacher_errors(config, catalogue),
    ]


def _path_errors(config: RunConfig) -> Errors:
    """Refuse missing or broken model folders, task files and interpreters."""
    folder = config.model.path
    yield from folder_errors(folder, "model.path")
    home, field = (config.model.tokenizer, "model.tokenizer") if config.model.tokenizer else (folder, "model.path")
    if os.path.isdir(folder) and not os.path.isfile(home / "tokenizer.json"):
        fix = "save the tokenizer there with transformers, or set model.tokenizer to a folder that has one"
        yield ConfigError(field, f"{home} without tokenizer.json", fix)
    if config.critic.path:  # the critic reads the policy's token ids
        yield from _other_vocabulary(config, config.critic.path, "critic.path", "name a model with that vocabulary")
    if config.reference.path:
        yield from _other_tokens(config, config.reference.path, "reference.path", "reference")
    sets = [(f"eval.sets.{index}.path", eval_set.path) for index, eval_set in enumerate(config.eval.sets)]
    for key, path in [("data.train", config.data.train), *sets]:
        if not path.exists():
            yield ConfigError(key, f"{path}, which does not exist", "name an existing task file")
    writable = {
        "environment": config.environment.writable,
        **{f"environments.{index}": choice.writable for index, choice in enumerate(config.environments)},
        **{f"rewards.{index}": choice.writable for index, choice in enumerate(config.rewards)},
        **{f"media.{index}": choice.writable for index, choice in enumerate(config.media)},
    }
    for key, folders in writable.items():
        for index, writes in enumerate(folders):
            if not os.path.isdir(writes) or os.path.realpath(writes) == "/":
                fix = "name an existing folder that the code needs, or create the folder"
                yield ConfigError(f"{key}.writable.{index}", writes, fix)
    for key, choice in (("engine.python", config.engine), ("trainer.python", config.trainer)):
        if choice.python and not Path(choice.python).is_file():
            yield ConfigError(key, f"{choice.python}, which does not exist", "name an existing Python interpreter")


def _context_errors(config: RunConfig) -> Errors:
    """Refuse samples longer than the model's context, and a `top_k` beyond its vocabulary."""
    with suppress(OSError):  # such as a path that is too long, which another check refuses
        if config.rollout.top_k and (config.model.path / "config.json").is_file():
            size = vocabulary_size(config.model.path)
            if size and config.rollout.top_k > size:
                yield ConfigError("rollout.top_k", config.rollout.top_k, f"the model has {size} tokens: set less, or 0")
    context = model_context(config.model.path)
    if context is None:
        return
    new, prompt, budget = config.rollout.max_new_tokens, config.data.max_prompt_tokens, config.rollout.token_budget
    holds = f"the model's context is {context} tokens{context_reason(config.model.path)}"
    if prompt is not None and new + prompt > context:
        got = f"{new}, which is {new + prompt} together with data.max_prompt_tokens = {prompt}"
        yield ConfigError("rollout.max_new_tokens", got, f"{holds}: lower one of the two")
    elif new >= context:
        yield ConfigError("rollout.max_new_tokens", new, f"{holds}, and a prompt needs some of them: set a lower value")
    for index, eval_set in enumerate(config.eval.sets):
        if eval_set.max_new_tokens is not None and eval_set.max_new_tokens + (prompt or 1) > context:
            with_prompt = f" and data.max_prompt_tokens is {prompt}" if prompt else ", and a prompt needs some of them"
            fix = f"{holds}{with_prompt}: set a lower value"
            yield ConfigError(f"eval.sets.{index}.max_new_tokens", eval_set.max_new_tokens, fix)
    if budget is not None and budget > context:
        yield ConfigError("rollout.token_budget", budget, f"{holds}: set {context} or less")


def _pool_file_errors(config: RunConfig) -> Errors:
    for index, pool in enumerate(config.engines):
        key = f"engines.{index}"
        yield from folder_errors(pool.path, f"{key}.path")
        python = config.backend_of(pool).python
        if pool.engine and python and not Path(python).is_file():
            yield ConfigError(f"{key}.engine.python", f"{python}, which does not exist", "name an existing interpreter")
        if pool.tokenizer is not None and not (pool.tokenizer / "tokenizer.json").is_file():
            yield ConfigError(f"{key}.tokenizer", f"{pool.tokenizer} without tokenizer.json", "save a tokenizer there")
        context = model_context(pool.path)
        if context is not None and pool.max_context > context:
            fix = (
                f"the pool's model has a context of {context} tokens{context_reason(pool.path)}: set {context} or less"
            )
            yield ConfigError(f"{key}.max_context", pool.max_context, fix)


def learns_from_teachers(config: RunConfig, catalogue: Catalogue) -> bool:
    """Return True if the run has teachers and its algorithm reads what they write."""
    if not config.teachers:
        return False
    algorithm = cast(Algorithm, catalogue.build(config.learner))
    return any(column.name in TEACHER_COLUMNS for column in algorithm.columns() | algorithm.advantage_columns())


def _teacher_errors(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Refuse teachers whose vocabulary or tokenizer differs from the policy's, if the algorithm uses teachers."""
    if not learns_from_teachers(config, catalogue):
        return
    for index, teacher in enumerate(config.teachers):
        key = f"teachers.{index}.{'engine' if teacher.engine else 'path'}"
        pool = config.pool(teacher.engine) if teacher.engine else None
        folder = pool.path if pool else teacher.path
        if folder is not None:
            yield from _other_tokens(config, folder, key, "teacher")


def _other_tokens(config: RunConfig, folder: Path, key: str, role: str) -> Errors:
    """Yield an error if the model folder of a role has another vocabulary or tokenizer than the policy."""
    home = config.model.tokenizer or config.model.path
    wrong = list(_other_vocabulary(config, folder, key, f"name a {role} with that vocabulary"))
    yield from wrong
    if wrong or not (config.model.path / "config.json").is_file():
        return
    if not (folder / "tokenizer.json").is_file():
        fix = f"save the {role}'s own tokenizer there, so that it can be compared with the tokenizer of {home}"
        yield ConfigError(key, f"{folder} without tokenizer.json", fix)
    elif (home / "tokenizer.json").is_file():
        mine, theirs = _tokens(home), _tokens(folder)
        for token in sorted(mine.keys() | theirs.keys()):
            if mine.get(token) != theirs.get(token):
                got = f"maps {token!r} to {theirs.get(token)} instead of {mine.get(token)}"
                fix = f"token ids must mean the same in both: name a {role} with the tokenizer of {home}"
                yield ConfigError(key, f"{folder}, whose tokenizer {got}", fix)
                return


def _other_vocabulary(config: RunConfig, folder: Path, key: str, fix: str) -> Errors:
    """Yield an error if the model folder is missing or broken, or if its vocabulary size differs from the policy's."""
    missing = list(folder_errors(folder, key))
    yield from missing
    if missing or not (config.model.path / "config.json").is_file():
        return
    expected, other = vocabulary_size(config.model.path), vocabulary_size(folder)
    if expected != other:
        fix = f"the policy has {expected}, and token ids must mean the same in both: {fix}"
        yield ConfigError(key, f"{folder} with a vocabulary of {other}", fix)


def _tokens(folder: Path) -> dict[str, int]:
    """Return the ids of all tokens in a folder's `tokenizer.json`."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: [token, score] in order of ids
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {**{str(token): int(index) for token, index in vocabulary.items()}, **added}
