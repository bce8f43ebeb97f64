# SPDX-License-Identifier: Apache-2.0
"""Checks of a run by its first step: a pure function from the step's metrics and facts to findings.

Before any update, engine, trainer and, without `reference.path`, the reference have the same weights, so a difference
between them is a mistake of the configuration. The remaining checks find a template, a tokenizer, a mask, a reward or
an optimizer that can't be right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_core.api.checks import MISMATCH, CheckFinding, CheckState, FirstStepFacts, far_apart

MOST_FAILED = 0.5
"""Largest fraction of issued samples that may fail."""
MOST_OUTPAID = 0.5
"""Largest fraction of tasks in which a sample may earn more than the task's own answer."""
MOST_FOREIGN = 0.01
"""Largest share of the tokenizer's tokens that the model may lack: a few added tokens, not another vocabulary."""
SHOWN = 2
"""Number of pieces of evidence that a failed check shows."""

Facts = Mapping[str, Any]


def first_step(facts: FirstStepFacts) -> tuple[CheckFinding, ...]:
    """Return all findings about step 1. A check without its metric or fact is `not applicable`.

    Causes come before their consequences: a wrong mask also leaves out end-of-turn tokens.
    """
    metrics, config, told, limit = facts.metrics, facts.config, facts.told, far_apart(facts.config)
    return (
        _tokenizer(told),
        _template(told),
        _mask(told),
        _trained(metrics, told),
        _ends(told, config),
        _engine(metrics, told, limit),
        _ratio(metrics, config, limit),
        _reference(metrics, config, limit),
        _answers(told),
        _rewards(metrics),
        _gradient(metrics, told),
        _learning_rate(metrics, told),
        _judged(metrics),
    )


def _check(
    name: str, fault: bool | CheckState, found: str, evidence: Iterable[str] = (), advice: str = ""
) -> CheckFinding:
    """Make a check. `fault`: True if the check failed, or its state."""
    state: CheckState = fault if isinstance(fault, str) else "failed" if fault else "ok"
    if state == "ok":
        return CheckFinding(name, state, found)
    return CheckFinding(name, state, found, "; ".join([*evidence][:SHOWN]), advice)


def _inapplicable(name: str, why: str) -> CheckFinding:
    return CheckFinding(name, "not applicable", why)


def _tokenizer(facts: Facts) -> CheckFinding:
    name = "tokenizer and model agree"
    known = facts.get("tokenizer") or {}
    foreign, tokens = known.get("foreign", 0), known.get("tokens", 0)
    ends = [
        f"{number} is {text!r}" if text else f"{number} is no token" for number, text in known.get("misread_ends", ())
    ]
    advice = (
        "the tokenizer is another model's: restore tokenizer.json from the model's source, or correct model.tokenizer"
    )
    if ends:
        return _check(name, True, "the tokenizer reads the model's eos_token_id as ordinary text", ends, advice)
    if foreign > MOST_FOREIGN * tokens:
        return _check(name, True, f"the model lacks {foreign} of the tokenizer's {tokens} tokens", (), advice)
    compared = [task for task in facts.get("tasks", ()) if task.get("other_ids") is not None]
    if not compared:
        return _inapplicable(name, "model.path has the only tokenizer of the run")
    other = [f"task {task['task']}: {task['other_ids']}" for task in compared if task["other_ids"]]
    advice = (
        "the model was trained with the tokenizer in model.path, so it reads other words than the prompt says; "
        "remove model.tokenizer, or set it to the model's own"
    )
    found = f"model.tokenizer gives other ids than model.path for {len(other)} of {len(compared)} prompts"
    return _check(name, bool(other), found, other, advice)


def _template(facts: Facts) -> CheckFinding:
    name, stops = "the template round trip is exact", dict(facts.get("stops", ()))
    tasks = [task for task in facts.get("tasks", ()) if "prompt_faults" in task]
    if not tasks:
        return _inapplicable(name, "the run renders no prompts")
    faults = [f"task {task['task']}: {fault}" for task in tasks for fault in task["prompt_faults"]]
    wrong = sum(bool(task["prompt_faults"]) for task in tasks)
    found = f"{wrong} of {len(tasks)} prompts differ from what the template wrote"
    advice = (
        "set model.chat_template to the template that the model was trained with, and check that it writes all messages"
    )
    if faults:
        return _check(name, True, found, faults, advice)
    endless = [task for task in tasks if task.get("turn_end") == ""]
    if not endless:
        return _check(name, False, found)
    if others := {task["user_end"] for task in endless if task.get("user_end")}:
        kept = f"a user's turn ends with {_texts(others)}, and the policy's turn does not: {endless[0]['closing']!r}"
        found = f"the template drops the end of the policy's turn in {len(endless)} of {len(tasks)} prompts"
        return _check(name, True, found, [kept], advice)
    marks = [f"the tokenizer splits {mark} into {count} tokens" for mark, count in endless[0].get("split_marks", ())]
    written = f"after a turn the template writes {endless[0]['closing']!r}, and turns end with {_texts(stops.values())}"
    found = f"the template ends a turn without a stop token in {len(endless)} of {len(tasks)} prompts"
    return _check(name, "failed" if marks else "warning", found, [written, *marks], advice)


def _mask(facts: Facts) -> CheckFinding:
    name, rows = "the mask covers what the policy sampled", facts.get("rows")
    if rows is None or "given" not in rows:
        return _inapplicable(name, "the policy sampled none of the rows" if rows else "no rows were trained")
    found = (
        f"{rows['given']} of {rows['trained']} trained tokens were given, "
        f"{rows['partly']} of {rows['turns']} turns are trained in part"
    )
    advice = (
        "loss_mask must be 1 at sampled tokens only; check for code that moves the mask or the tokens by a position"
    )
    state: CheckState = "failed" if rows["given"] else "warning" if rows["partly"] else "ok"
    return _check(name, state, found, (*rows["wrongly_trained"][:1], *rows["untrained"]), advice)


def _trained(metrics: Mapping[str, Any], facts: Facts) -> CheckFinding:
    name, tokens, rows = "tokens are trained", metrics.get("tokens/trained"), facts.get("rows") or {}
    tokens = rows["trained"] if tokens is None and rows.get("samples") else tokens
    if tokens is None:
        return _inapplicable(name, "no rows were trained")
    empty = rows.get("empty", ())
    found = f"{tokens:.0f}" + (f" tokens, and none in {len(empty)} of {rows['samples']} samples" if empty else "")
    advice = "tokens are masked; check that samples contain tokens sampled by the policy"
    return _check(name, "warning" if tokens > 0 and empty else tokens <= 0, found, empty, advice)


def _ends(facts: Facts, config: Mapping[str, Any]) -> CheckFinding:
    """Check the tokens with which turns end. `ends` of the rows: (token, turns that end with it, turns that train it)."""
    name, stops = "end-of-turn tokens are trained", dict(facts.get("stops", ()))
    rows = facts.get("rows") or {}
    if not stops or not rows.get("ends"):
        return _inapplicable(name, "no turns were trained")
    ends = [(stops[token], turns, trained) for token, turns, trained in rows["ends"] if token in stops]
    turns, trained = sum(of for _, of, _ in ends), sum(of for _, _, of in ends)
    found = f"{trained} of {turns} turns that end with {_texts(text for text, _, _ in ends)}"
    if not turns:
        found = f"none of {rows['turns']} turns ends with {_texts(stops.values())}"
        if config.get("rollout", {}).get("stop"):
            return _inapplicable(name, f"rollout.stop ends turns; {found}")
        if "given" in rows:  # the policy sampled the rows, and the token limit may be too small for its turns
            return _check(name, "warning", found, (), "raise rollout.max_new_tokens, unless the environment ends turns")
        advice = "a model that sees no such token never learns to stop; check model.chat_template"
        return _check(name, True, found, (), advice)
    if trained < turns:
        advice = "the policy can't learn to stop; check for code that shortens loss_mask or moves it by a position"
        return _check(name, True, found, rows["untrained"], advice)
    written = {str(task["turn_end"]) for task in facts.get("tasks", ()) if task.get("turn_end")}
    sampled = {text for text, _, _ in ends}
    if written and written <= {*stops.values()} - sampled:
        advice = "the policy ends its turns otherwise than the template; check model.chat_template, or the model's stop tokens"
        return _check(name, "warning", found, [f"the template ends turns with {_texts(written)}"], advice)
    return _check(name, False, found)


def _engine(metrics: Mapping[str, Any], facts: Facts, limit: float) -> CheckFinding:
    name, seen = "engine and trainer agree", facts.get("log_probs") or {}
    apart = metrics.get(MISMATCH, seen.get("engine_trainer"))  # the trainer measures nothing if no row has a gradient
    if apart is None:
        return _inapplicable(name, "no engine sampled the rows")
    kl, reference = metrics.get("policy/ref_kl"), seen.get("trainer_reference")
    advice = "check that both use the same weights, tokens, temperature, top_p and top_k"
    if reference is not None and seen["engine_reference"] <= limit < reference:
        advice = "engine and reference agree, so the trainer has other weights; check what it loads"
    elif (reference is not None and reference <= limit) or (reference is None and kl is not None and kl <= limit):
        advice = "trainer and reference agree, so the engine has other or stale weights, or samples in another way"
    return _check(name, apart > limit, f"|log-prob difference| {apart:.1e}", map(_token, seen.get("worst", ())), advice)


def _token(seen: Sequence[Any]) -> str:
    """Describe one compared token: (group, sample, place, token, engine, trainer, reference or None)."""
    group, sample, place, token, engine, trainer, reference = seen
    third = "" if reference is None else f", reference {reference:.3f}"
    at = f"token {place} (id {token}) of group {group}, sample {sample}"
    return f"{at}: engine {engine:.3f}, trainer {trainer:.3f}{third}"


def _ratio(metrics: Mapping[str, Any], config: Mapping[str, Any], limit: float) -> CheckFinding:
    name, ratio = "the ratio is 1", metrics.get("policy/ratio_max")
    if ratio is None:
        return _inapplicable(name, "the algorithm measures no ratio")
    batch = config.get("batch", {})
    if batch.get("updates_per_step", 1) * batch.get("passes", 1) != 1:
        return _inapplicable(name, "later updates of the step have moved the policy")
    most = math.exp(max(limit, float(metrics.get("train/rollout_log_prob_diff_max", 0.0))))
    what = "before an update the ratio must be 1; check for dropout, and for a loss that changes log-probs"
    return _check(name, not ratio <= most, f"at most {ratio:.4g}", (), what)


def _reference(metrics: Mapping[str, Any], config: Mapping[str, Any], limit: float) -> CheckFinding:
    name, divergence = "policy and reference agree", metrics.get("policy/ref_kl")
    if config.get("reference", {}).get("path"):
        return _inapplicable(name, "reference.path names another model")
    if divergence is None:
        return _inapplicable(name, "the algorithm measures no KL to a reference")
    what = "both must start from the model folder; check that the reference loads that folder"
    return _check(name, not divergence <= limit, f"KL {divergence:.1e}", (), what)


def _answers(facts: Facts) -> CheckFinding:
    name = "the task's own answer earns most"
    tasks = [task for task in facts.get("tasks", ()) if task.get("answer")]
    if not tasks:
        return _inapplicable(name, "no task has an answer that the rewards alone judge")
    less = [task for task in tasks if task["answer"]["earned"] < task["answer"]["best"]]
    shown = [
        f"task {task['task']}: {of['response']!r} earns {of['best']:g}, and the answer {of['text']!r} only {of['earned']:g}"
        for task in less
        for of in (task["answer"],)
    ]
    found = f"at least as much as the best sample in {len(tasks) - len(less)} of {len(tasks)} tasks"
    advice = (
        "check that the answers are right and that the rewards accept them as written; "
        "rewards of form, such as of reasoning, may exceed the bare answer"
    )
    state: CheckState = "failed" if len(less) > MOST_OUTPAID * len(tasks) else "warning" if less else "ok"
    return _check(name, state, found, shown, advice)


def _rewards(metrics: Mapping[str, Any]) -> CheckFinding:
    name, spread = "rewards differ", metrics.get("reward/std")
    if spread is None:
        return _inapplicable(name, "the run has no rewards")
    what = "all samples earn the same; check for tasks that are too hard or easy, and a reward that misreads answers"
    mean = metrics.get("reward/mean", math.nan)
    return _check(name, "ok" if spread > 0 else "warning", f"mean {mean:.3g}, spread {spread:.3g}", (), what)


def _gradient(metrics: Mapping[str, Any], facts: Facts) -> CheckFinding:
    name, norm = "the gradient is finite and not 0", metrics.get("train/grad_norm")
    if norm is None or not facts.get("updates", True):
        return _inapplicable(name, "the step does not update the policy")
    flat, trained = metrics.get("samples/no_gradient", 0.0), metrics.get("samples/trained", 0.0)
    found = f"norm {norm:.3g}"
    if metrics.get("train/skipped_updates", 0.0) or not math.isfinite(norm):
        what = "the update was not finite and was skipped; check the number formats, learning rate and losses"
        return _check(name, True, found, (), what)
    what = f"{flat:.0f} of {trained:.0f} samples have no gradient, since their whole group earns the same reward"
    return _check(name, "ok" if norm > 0 else "warning", found, (), what)


def _learning_rate(metrics: Mapping[str, Any], facts: Facts) -> CheckFinding:
    name, rate = "the learning rate is above 0", metrics.get("train/lr")
    if rate is None or not facts.get("updates", True):
        return _inapplicable(name, "the step does not update the policy")
    what = "the update changes no weight; check optimizer.lr, its schedule, and the trainer's own settings"
    return _check(name, not rate > 0, f"{rate:.3g}", (), what)


def _judged(metrics: Mapping[str, Any]) -> CheckFinding:
    name, issued = "samples are judged", metrics.get("samples/issued", 0.0)
    if not issued:
        return _inapplicable(name, "the run issued no samples")
    failed = metrics.get("samples/dropped/failed", 0.0)
    what = "see their outcomes and errors in `samples/` of the run directory"
    return _check(name, failed > MOST_FAILED * issued, f"{failed:.0f} of {issued:.0f} failed", (), what)


def _texts(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(map(repr, texts))) or "no token"
