# SPDX-License-Identifier: Apache-2.0
"""Combinations that can't work, found before anything starts. Each check is one function from configuration to errors.

They read class attributes of components (`min_group_size`, `max_staleness`, `gives_reward`) and call no plugin code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias, cast

from relax_core.api.algorithm import Algorithm, Source
from relax_core.api.engine import Engine, switched_off
from relax_core.api.environment import Environment
from relax_core.api.errors import ConfigError
from relax_core.api.modality import ModalityProcessor
from relax_core.api.trainer import Trainer
from relax_core.api.weights import WeightTransport
from relax_core.config.run_config import RunConfig
from relax_core.config.tables import CriticTable, RankPlacement
from relax_core.registry.catalogue import Catalogue

Errors: TypeAlias = Iterator[ConfigError]
Check: TypeAlias = Callable[[RunConfig, Catalogue], Errors]


def combination_errors(config: RunConfig, catalogue: Catalogue) -> list[ConfigError]:
    """Return the errors that all checks find."""
    return [error for check in CHECKS for error in check(config, catalogue)]


def group_size(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Some algorithms compare samples of one task."""
    if not samples(config, catalogue):
        return
    for name, algorithm in _algorithms(config, catalogue):
        if config.rollout.group_size < algorithm.min_group_size:
            fix = f"{name} compares the samples of a task: set {algorithm.min_group_size} or more"
            yield ConfigError("rollout.group_size", config.rollout.group_size, fix)


def staleness_of_algorithm(config: RunConfig, catalogue: Catalogue) -> Errors:
    """An algorithm may be right only near the policy."""
    for name, algorithm in _algorithms(config, catalogue) if samples(config, catalogue) else ():
        most = algorithm.max_staleness
        if most is not None and (config.staleness is None or config.staleness > most):
            fix = f"{name} is right up to {most}: set max_staleness = {most}"
            yield ConfigError("max_staleness", config.max_staleness, fix)


def environments(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Tasks find theirs by its name, and their algorithms must need the same of the run."""
    names = [config.environment.name, *(one.name for one in config.environments)]
    first = _algorithm(config, catalogue)
    for at, one in enumerate(config.environments):
        if one.name in names[: at + 1]:
            fix = "tasks name theirs, so each is there once: leave it out, or write its options where it is"
            yield ConfigError(f"environments.{at}.name", repr(one.name), fix)
        if one.learner is None:
            continue
        key, own = (
            f"environments.{at}.algorithm",
            cast(type[Algorithm], catalogue.target("algorithm", one.learner.name)),
        )
        got, of_run = f"{one.learner.name} beside {config.algorithm.name}", first.source is Source.ROLLOUT
        if not of_run or own.source is not Source.ROLLOUT:
            yield ConfigError(
                key, got, "only one of them learns from samples of environments: choose both so, or leave it out"
            )
        elif set(own.fits) != set(first.fits):
            yield ConfigError(key, got, "only one of them trains a critic, which values all rows: choose both alike")
        elif own.greedy_baseline != first.greedy_baseline:
            yield ConfigError(key, got, "only one of them has a greedy sample in each group: choose both alike")


def determinism(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Determinism leaves no room for samples of older weights."""
    if config.deterministic and config.max_staleness != 0:
        yield ConfigError("max_staleness", config.max_staleness, "deterministic = true needs max_staleness = 0")


def kept_caches(config: RunConfig, catalogue: Catalogue) -> Errors:
    """A cache that outlives an update makes tokens older than the weights that sample them."""
    if not config.rollout.kv_across_versions:
        return
    if config.max_staleness == 0:
        fix = "tokens would be a version older than max_staleness = 0 allows: set max_staleness = 1 or more, or leave it out"
        yield ConfigError("rollout.kv_across_versions", True, fix)
    engine = cast(type[Engine], catalogue.target("engine", config.engine.name))
    if not engine.capabilities.keeps_kv_across_versions:
        fix = f"engine {config.engine.name} computes its caches again after an update: set it to false"
        yield ConfigError("rollout.kv_across_versions", True, fix)


def weight_transport(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Sender, transport and engine must speak of the same thing."""
    weights, engine = config.weights, cast(type[Engine], catalogue.target("engine", config.engine.name))
    transport = cast(type[WeightTransport], catalogue.target("weight-transport", weights.name))
    able = sorted(engine.capabilities.transports)
    if weights.name.rpartition(":")[2] not in able:
        fix = f"engine {config.engine.name} takes {', '.join(able) or 'no weights while it runs'}"
        yield ConfigError("weights.name", weights.name, fix)
    if weights.payload not in transport.payloads:
        fix = f"{weights.name} moves {', '.join(sorted(transport.payloads))}"
        yield ConfigError("weights.payload", weights.payload, fix)
    if weights.payload == "delta" and not engine.capabilities.delta:
        yield ConfigError(
            "weights.payload", "delta", f'engine {config.engine.name} loads full versions only: use "full"'
        )
    elif weights.payload == "delta" and (switch := switched_off(engine, "delta", config.engine.chosen.options)):
        fix = f'engine {config.engine.name} keeps nothing to put deltas on: write engine.{switch} = true, or use "full"'
        yield ConfigError("weights.payload", "delta", fix)


def live_weights(config: RunConfig, catalogue: Catalogue) -> Errors:
    """A live transport works while the trainer does: it must lend itself to it."""
    transport = cast(type[WeightTransport], catalogue.target("weight-transport", config.weights.name))
    trainer = cast(type[Trainer], catalogue.target("trainer", config.trainer.name))
    if transport.live and trainer.transfer is Trainer.transfer:
        fix = (
            f'trainer {config.trainer.name} hands out no live weights: use a stored transport, such as "shared-memory"'
        )
        yield ConfigError("weights.name", config.weights.name, fix)


def weight_proof(config: RunConfig, catalogue: Catalogue) -> Errors:
    """An engine proves no more than it can tell; a canary is scored by it."""
    proof = config.weights.proof
    can = cast(type[Engine], catalogue.target("engine", config.engine.name)).capabilities
    if proof == "behaviour" and not can.score:
        fix = f'engine {config.engine.name} scores no given tokens: use "auto"'
        yield ConfigError("weights.proof", proof, fix)
    if proof == "resident" and can.receipts == "wire":
        fix = f'engine {config.engine.name} can\'t tell what lies in its memory: use "auto"'
        yield ConfigError("weights.proof", proof, fix)


def media(config: RunConfig, catalogue: Catalogue) -> Errors:
    """One processor a kind of medium, and an engine that takes it, where one samples."""
    generated = samples(config, catalogue)
    can = cast(type[Engine], catalogue.target("engine", config.engine.name)).capabilities.media
    by_kind: dict[str, str] = {}
    for at, choice in enumerate(config.media):
        kind = cast(type[ModalityProcessor], catalogue.target("modality-processor", choice.name)).medium
        if kind in by_kind:
            yield ConfigError(f"media.{at}.name", choice.name, f"{by_kind[kind]} reads {kind} already: leave one out")
        if generated and kind not in can:
            takes = ", ".join(sorted(can)) or "text only"
            fix = (
                f"engine {config.engine.name} takes {takes}: use {_engines_that_take(kind, catalogue)}, or leave it out"
            )
            yield ConfigError(f"media.{at}.name", choice.name, fix)
        by_kind[kind] = choice.name


def _engines_that_take(kind: str, catalogue: Catalogue) -> str:
    kinds = {name: cast(type[Engine], catalogue.target("engine", name)) for name in catalogue.names("engine")}
    return " or ".join(name for name, engine in kinds.items() if kind in engine.capabilities.media) or "another"


def updates(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Groups are never split over updates."""
    if config.batch.updates_per_step > config.rollout.prompts_per_step:
        most = config.rollout.prompts_per_step
        fix = f"a step has rollout.prompts_per_step = {most} groups: set {most} or less"
        yield ConfigError("batch.updates_per_step", config.batch.updates_per_step, fix)


def micro_batches(config: RunConfig, catalogue: Catalogue) -> Errors:
    """One holds the longest row that is sure to come, and there is a row for each rank."""
    budget, rollout = config.batch.tokens_per_micro_batch, config.rollout
    if not samples(config, catalogue):
        return
    longest = rollout.max_new_tokens + (config.data.max_prompt_tokens or 1)
    if 0 < budget < longest:
        fix = f"a row has up to {longest} tokens (rollout.max_new_tokens and a prompt): set that or more, or 0"
        yield ConfigError("batch.tokens_per_micro_batch", budget, fix)
    ranks, rows = (
        config.placement.actor.ranks,
        rollout.prompts_per_step * rollout.group_size // config.batch.updates_per_step,
    )
    if ranks > rows > 0:
        fix = f"an update has {rows} rows, and a rank without any has nothing to do: set {rows} or less"
        yield ConfigError("placement.actor.ranks", ranks, fix)


def rewards(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Someone has to judge the samples."""
    silent = [
        one.name
        for one in (config.environment, *config.environments)
        if not cast(type[Environment], catalogue.target("environment", one.name)).gives_reward
    ]
    judged = config.rewards or not silent or not any(own.reads_rewards for _, own in _algorithms(config, catalogue))
    if _algorithm(config, catalogue).source is Source.ROLLOUT and not judged:
        names = ", ".join(catalogue.names("reward")) or "none is installed"
        fix = f'environment {silent[0]} gives no reward: write rewards = ["NAME"] ({names})'
        yield ConfigError("rewards", "nothing", fix)


def reward_weights(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Weights that are all 0 train on nothing."""
    if config.rewards and all(reward.weight == 0 for reward in config.rewards):
        yield ConfigError("rewards.0.weight", 0.0, "every weight is 0: give one reward another weight")


def evaluation(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Names are metric keys, and greedy samples are all alike."""
    for name, count in Counter(known.name for known in config.eval.sets).items():
        if count > 1:
            yield ConfigError("eval.sets", f"{count} sets named {name!r}", "give each its own name")
    default = config.eval.temperature
    plans = [("eval", default, config.eval.samples)]
    for index, known in enumerate(config.eval.sets):
        temperature = default if known.temperature is None else known.temperature
        plans.append((f"eval.sets.{index}", temperature, known.samples or config.eval.samples))
    for key, temperature, samples in plans[1:] or plans:
        if temperature == 0 and samples > 1:
            yield ConfigError(
                f"{key}.samples", samples, "temperature 0 gives the same sample each time: set samples = 1"
            )


def token_budget(config: RunConfig, catalogue: Catalogue) -> Errors:
    """A sample's budget holds its first turn."""
    budget, rollout = config.rollout.token_budget, config.rollout
    if budget is not None and budget < rollout.max_new_tokens:
        fix = f"set at least rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield ConfigError("rollout.token_budget", budget, fix)


def forward_placement(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Others share with the actor; and what the actor does itself needs no ranks of its own."""
    placement = config.placement
    if placement.actor.share not in ("", "own"):
        fix = 'the others share with the actor: leave it out, or set placement.rollout.share = "actor"'
        yield ConfigError("placement.actor.share", repr(placement.actor.share), fix)
        return
    own = placement.actor_fwd != RankPlacement(share=placement.actor_fwd.share)
    if own and placement.home("actor_fwd") == "actor" and not config.teachers:  # a teacher may need its own pass
        fix = 'on the actor\'s devices the actor does this itself: leave it out, or set share = "own"'
        yield ConfigError("placement.actor_fwd", "ranks of its own", fix)


def critic_of_algorithm(config: RunConfig, catalogue: Catalogue) -> Errors:
    """Refuse settings of a critic where the algorithm trains none, since they would have no effect."""
    if "critic" in _algorithm(config, catalogue).fits:
        return
    fix = f"{config.algorithm.name} trains no critic: leave it out, or choose an algorithm that does, such as ppo"
    if config.critic != CriticTable():
        yield ConfigError("critic", ", ".join(sorted(config.critic.model_fields_set)), fix)
    if config.placement.critic != RankPlacement():
        yield ConfigError("placement.critic", "ranks of its own", fix)


def pool_errors(config: RunConfig, catalogue: Catalogue) -> Iterator[ConfigError]:
    """Two pools of one name, and teachers with no model or with two."""
    names = [pool.name for pool in config.engines]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield ConfigError(f"engines.{at}.name", name, "pools are found by their names: give each its own")
    for at, teacher in enumerate(config.teachers):
        key = f"teachers.{at}"
        if not teacher.engine and teacher.path is None:
            yield ConfigError(key, "neither path nor engine", 'write path = "FOLDER", or engine = "POOL"')
        if teacher.engine and teacher.path is not None:
            yield ConfigError(f"{key}.path", f"{teacher.path} beside engine = {teacher.engine!r}", "keep one of them")
        if teacher.engine and teacher.dtype:
            yield ConfigError(f"{key}.dtype", teacher.dtype, f"write it in the pool {teacher.engine} of [[engines]]")
        if teacher.engine and teacher.engine not in names:
            yield ConfigError(f"{key}.engine", repr(teacher.engine), no_pool(config))


def no_pool(config: RunConfig) -> str:
    """Return advice for a pool that is named but not defined."""
    names = ", ".join(pool.name for pool in config.engines)
    return f"the pools of [[engines]] are {names}" if names else "add it: [[engines]] with name and path"


def holdout_errors(config: RunConfig, num_tasks: int) -> list[ConfigError]:
    """For whoever has read the data: a hold-out must leave something to train on."""
    if config.eval.sets or not config.eval.every or config.eval.size < num_tasks:
        return []
    fix = f"{config.data.train} has {num_tasks} tasks: hold out fewer, name [[eval.sets]], or set eval.every = 0"
    return [ConfigError("eval.size", config.eval.size, fix)]


CHECKS: tuple[Check, ...] = (
    group_size,
    staleness_of_algorithm,
    environments,
    determinism,
    kept_caches,
    weight_transport,
    live_weights,
    weight_proof,
    media,
    pool_errors,
    updates,
    micro_batches,
    rewards,
    reward_weights,
    evaluation,
    token_budget,
    forward_placement,
    critic_of_algorithm,
)


def samples(config: RunConfig, catalogue: Catalogue) -> bool:
    """Whether the run generates what it trains on."""
    return _algorithm(config, catalogue).source is Source.ROLLOUT


def _algorithms(config: RunConfig, catalogue: Catalogue) -> list[tuple[str, type[Algorithm]]]:
    """The run's and those of its environments, by name."""
    return [(one.name, cast(type[Algorithm], catalogue.target("algorithm", one.name))) for one in config.algorithms]


def _algorithm(config: RunConfig, catalogue: Catalogue) -> type[Algorithm]:
    return cast(type[Algorithm], catalogue.target("algorithm", config.algorithm.name))
