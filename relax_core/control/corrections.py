# SPDX-License-Identifier: Apache-2.0
"""Notes of a plan about `algorithm.correction`: the differences to correct, the effect, and the reason for the default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from relax_core.api.batch import ROLLOUT_LOG_PROBS
from relax_core.api.model_folder import routing
from relax_core.config.run_config import RunConfig
from relax_core.config.tables import RolloutTable
from relax_core.learn.policy_gradient import WEIGHS, PolicyGradient, PolicyGradientOptions
from relax_core.registry.catalogue import Catalogue

STUDY = "docs/benchmarks.md#defaults"


def correction_notes(config: RunConfig, catalogue: Catalogue) -> Iterator[str]:
    """Yield one line for each policy gradient of a run that samples.

    An algorithm that defines its own loss may use the correction in another way, so it gets none.
    """
    differences = list(_differences(config))
    for chosen in config.algorithms:
        algorithm = catalogue.build(chosen)
        if not isinstance(algorithm, PolicyGradient) or type(algorithm).loss is not PolicyGradient.loss:
            continue
        options: PolicyGradientOptions = algorithm.options
        correction = options.correction
        default = type(options).model_fields["correction"].default
        if correction == default:
            source = f"the default of {chosen.name}, since {_why(algorithm, config.staleness != 0)}"
        else:
            source = f"the default of {chosen.name} is {default!r}"
        effect = (
            _effect(algorithm) if differences else "engine and trainer differ by rounding alone, so it changes little"
        )
        to_correct = f"to correct: {', '.join(differences)}; " if differences else ""
        yield f"algorithm.correction is {correction!r} ({source}); {to_correct}{effect}"


def truncation_notes(config: RunConfig, catalogue: Catalogue) -> Iterator[str]:
    """Yield a warning for each algorithm whose ratio is to an engine that samples from a truncated distribution.

    Such an engine renormalises its log-probs, and the trainer does not. So the ratio of a token is the share of the
    probability that top_p and top_k keep, even without lag. The weight of `truncate` is this share: it gives the policy
    gradient over the kept tokens.
    """
    table = config.rollout
    given = [
        f"rollout.{name} = {getattr(table, name):g}"
        for name in ("top_p", "top_k")
        if getattr(table, name) != RolloutTable.model_fields[name].default
    ]
    for chosen in config.algorithms if given else ():
        algorithm = catalogue.build(chosen)
        if not isinstance(algorithm, PolicyGradient) or ROLLOUT_LOG_PROBS not in algorithm.columns():
            continue
        options = algorithm.options
        if options.correction != "behaviour" or getattr(options, "clip_low", 0.0) >= 1:
            continue
        fix = "set rollout.top_p = 1 and rollout.top_k = 0"
        if "truncate" in get_args(type(options).model_fields["correction"].annotation):
            fix = f'set algorithm.correction = "truncate", or {fix}'
        yield (
            f"warning: {' and '.join(given)} with algorithm.correction = 'behaviour' ({chosen.name}): each token's ratio is "
            "at most the share of the probability that was kept for it, so the bounds of the ratio take the gradient from "
            f"tokens with a negative advantage where this share is small; {fix}"
        )


def _differences(config: RunConfig) -> Iterator[str]:
    """Yield the known differences between the policy that sampled and the policy that is trained."""
    if (lag := config.staleness) != 0:
        yield "lag without a bound" if lag is None else f"up to {lag} version{'s' * (lag > 1)} of lag"
    if (updates := config.batch.updates) > 1:
        yield f"{updates} updates per step"
    trained, served = config.model.dtype, config.engine_dtype
    if served != trained:
        yield f"engines in {served} beside trainers in {trained}"
    elif served != "float32":
        yield f"engines and trainers that round differently in {served}"
    if config.model.routing_replay == "off" and routing(config.model.path) is not None:
        yield "experts that engine and trainer choose apart (model.routing_replay is off)"
    if config.rollout.top_p < 1 or config.rollout.top_k:
        yield "a truncated distribution (rollout.top_p, rollout.top_k)"


def _why(algorithm: PolicyGradient[PolicyGradientOptions], lags: bool) -> str:
    """Return the reason for an algorithm's default correction; `lags`: rows of the run may have lag."""
    if len(get_args(type(algorithm.options).model_fields["correction"].annotation)) == 1:
        return "it has no other"
    if not algorithm.has_ratio:
        return "it has no ratio that a clip could bound"
    if getattr(algorithm, "ratio_level", "token") != "token":
        better = f", though at a lag of 1 GSPO learnt more with 'behaviour' in 4 of 5 seeds ({STUDY})" if lags else ""
        return f"the bounds of its sequences' ratios are narrower than the rounding of an engine{better}"
    return f"GRPO learnt most with it at lags of 1, 2 and 4 and with a bf16 engine ({STUDY})"


def _effect(algorithm: PolicyGradient[PolicyGradientOptions]) -> str:
    """Return how the correction acts on the loss."""
    options = algorithm.options
    if options.correction == "behaviour":
        return "the ratio is to the policy that sampled, so its bounds limit all of this"
    if options.correction not in WEIGHS:
        return "nothing corrects this"
    units = {
        "token": "a token's weight",
        "sequence": "a sequence's weight",
        "geometric": "the mean weight of a sequence",
    }
    weight = units[options.correction_level]
    if options.correction == "truncate":
        effect = f"{weight} is at most {options.correction_cap:g}"
    else:
        effect = (
            f"tokens are left out if {weight} is outside {options.correction_floor:g} to {options.correction_cap:g}"
        )
    return f"the ratio is to the policy at the step's start, and {effect}" if algorithm.has_ratio else effect
