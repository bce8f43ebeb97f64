# SPDX-License-Identifier: Apache-2.0
"""From the TOML to the number: every setting that changes what is learnt is set, and seen in the thing that it governs.

The settings are those of the schema. A new one fails here until it is seen (`SEEN`), is known to be seen elsewhere
(`ELSEWHERE`, by test), or does not change what is learnt (`NOT_LEARNT`).
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from relax_core.api.engine import EngineSpec
from relax_core.api.events import EvalFinished
from relax_core.api.trainer import TrainerSpec
from relax_core.config.run_config import COMPONENT_TABLES, Core
from tests.unit.roles.simulated_run import Asked, RunOutcome, SimulatedRun, record_calls

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4


@dataclass(frozen=True)
class Observed:
    """The outcome of one run, and what its workers were given."""

    asked: Asked
    outcome: RunOutcome

    @property
    def actor(self) -> TrainerSpec:
        return self.asked.trainers["actor"]

    @property
    def critic(self) -> TrainerSpec:
        return self.asked.trainers["critic"]

    @property
    def engine(self) -> EngineSpec:
        return self.asked.engines["engine-0"]

    @property
    def family(self) -> Mapping[str, Any]:
        """The table that the model family was opened with."""
        return self.asked.families[0]

    @property
    def prompts(self) -> set[str]:
        """Texts of the requests, without what was sampled before."""
        return {"".join(map(chr, one.tokens)).rstrip("x") for one in self.asked.requests}

    @property
    def trained(self) -> list[list[int]]:
        """Of each trained row, the lengths of its trained stretches: turns that the policy sampled, or a completion."""
        masks = [mask for rows in self.asked.rows for mask in rows.columns["loss_mask"].rows()]
        return [[len(one) for one in "".join(map(str, mask)).split("0") if one] for mask in masks]

    def of_requests(self, name: str) -> set[Any]:
        return {getattr(request, name) for request in self.asked.requests}

    def updates(self, role: str) -> int:
        return len(self.outcome.of(f"{role}-rank", "finish_update"))

    def evaluated(self, name: str) -> list[Any]:
        return [getattr(event, name) for event in self.outcome.told(EvalFinished)]


See = Callable[[Observed], Any]


@dataclass(frozen=True)
class Seen:
    """A value, where it is seen, and as what. Other tables that it needs are `beside`."""

    value: Any
    see: See
    want: Any
    beside: Mapping[str, Any] = field(default_factory=dict)


def _optimizer(name: str, value: Any, want: Any = None) -> Seen:
    return Seen(value, lambda run: getattr(run.actor.optimizer, name), value if want is None else want)


PPO, EVALUATES = {"algorithm": "ppo"}, {"eval": {"every": 2, "size": 4, "temperature": 0.5}}


GIVEN = {"algorithm": "sft", "rewards": [], "data": {"train": "given.jsonl"}}
"""A run that trains on rows of a dataset."""
GUESSES = {
    "environment": {"name": "guess-number", "size": 26}, "rewards": [], "data": {"train": "both.jsonl"},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 3, "max_turns": 2},
}  # fmt: skip
"""A run of two turns at most, of up to three tokens, in which a turn of the one token `x` wins."""


def _questions(run: Observed) -> set[str]:
    return {prompt[:1] for prompt in run.prompts}


def _of_model(name: str, value: Any, see: Callable[[Any], Any] = lambda value: value) -> Seen:
    """A key of `[model]` that the model family reads."""
    return Seen(value, lambda run: see(run.family[name]), value)


def _name_of(path: Any) -> str:
    return Path(str(path)).name


def _weight(run: Observed) -> set[float]:
    """The mean reward over the mean of the one reward of the run, step by step."""
    steps = zip(run.outcome.metric("reward/mean"), run.outcome.metric("reward/scripted-reward"), strict=True)
    return {round(mean / own, 6) for mean, own in steps if own}


SEEN = {
    "steps": Seen(6, lambda run: (len(run.outcome.steps), run.actor.optimizer.total_steps), (6, 6)),
    "seed": Seen(7, lambda run: (run.actor.seed, run.engine.seed), (7, 7)),
    "max_staleness": Seen(2, lambda run: run.actor.max_staleness, 2, {"placement": "async"}),
    "deterministic": Seen(True, lambda run: (run.actor.deterministic, run.engine.deterministic), (True, True)),
    "model.path": Seen(
        "other-model",
        lambda run: {_name_of(one["path"]) for one in (run.actor.model, run.engine.model, run.family)},
        {"other-model"},
    ),
    "model.dtype": Seen(
        "bfloat16", lambda run: {one["dtype"] for one in (run.actor.model, run.engine.model)}, {"bfloat16"}
    ),
    "model.tokenizer": _of_model("tokenizer", "own-tokenizer", _name_of),
    "model.chat_template": _of_model("chat_template", "{{ messages }}"),
    "model.chat_template_kwargs": _of_model("chat_template_kwargs", {"enable_thinking": False}),
    "model.chat_template_date": _of_model("chat_template_date", "2026-01-31"),
    "model.tool_calls": _of_model("tool_calls", "hermes"),
    "model.freeze": Seen(["vision"], lambda run: run.actor.model["freeze"], ["vision"]),
    "data.train": Seen("other.jsonl", _questions, {"o"}),
    "data.columns": Seen({"prompt": "question"}, _questions, {"q"}, {"data": {"train": "both.jsonl"}}),
    "data.system_prompt": Seen(
        "be good",
        lambda run: {prompt.partition("]")[0] for prompt in run.prompts},
        {"[system:be good"},
        {"data": {"train": "chats.jsonl"}},
    ),
    "data.max_prompt_tokens": Seen(2, lambda run: run.prompts, {f"p{at}" for at in range(10)}),
    "data.too_long": Seen(
        "truncate", lambda run: run.prompts, {f"p{at}"[-2:] for at in range(16)}, {"data": {"max_prompt_tokens": 2}}
    ),
    "data.max_row_tokens": Seen(
        6, lambda run: {len(row) for rows in run.asked.rows for row in rows.columns["tokens"].rows()}, {6}, GIVEN
    ),
    "data.train_on": Seen("all", lambda run: {length for (length,) in run.trained}, {5, 6}, GIVEN),
    "data.shuffle": Seen(
        False,
        lambda run: [one.tokens for one in run.asked.requests[:16:4]],
        [tuple(map(ord, f"p{at}")) for at in range(4)],
    ),
    "rollout.groups_per_step": Seen(2, lambda run: run.outcome.account.trained, STEPS * 2 * 4),
    "rollout.group_size": Seen(2, lambda run: run.outcome.account.trained, STEPS * 4 * 2),
    "rollout.max_new_tokens": Seen(5, lambda run: run.of_requests("max_new_tokens"), {5}),
    "rollout.temperature": Seen(0.7, lambda run: (run.of_requests("temperature"), run.actor.temperature), ({0.7}, 0.7)),
    "rollout.top_p": Seen(0.9, lambda run: run.of_requests("top_p"), {0.9}),
    "rollout.top_k": Seen(5, lambda run: run.of_requests("top_k"), {5}),
    "rollout.stop": Seen(["xx"], lambda run: {length for (length,) in run.trained}, {1, 2}),
    "rollout.max_turns": Seen(3, lambda run: max(map(len, run.trained)), 3, GUESSES),
    "rollout.token_budget": Seen(9, lambda run: run.of_requests("max_new_tokens"), {7, 6}),
    "rollout.truncated": Seen("mask", lambda run: {turns[-1] for turns in run.trained}, {2}, GUESSES),
    "rollout.dtype": Seen(
        "bfloat16",
        lambda run: (run.engine.model["dtype"], run.actor.publish_dtype, run.actor.model["dtype"]),
        ("bfloat16", "bfloat16", "float32"),
    ),
    "rollout.kv_across_versions": Seen(
        True,
        lambda run: run.engine.kv_across_versions,
        True,
        {"placement": "async", "max_staleness": 1, "engine": "scripted-keeping-engine"},
    ),
    "optimizer.lr": _optimizer("lr", 0.01),
    "optimizer.schedule": _optimizer("schedule", "cosine"),
    "optimizer.warmup_steps": _optimizer("warmup_steps", 3),
    "optimizer.betas": _optimizer("betas", [0.8, 0.9], (0.8, 0.9)),
    "optimizer.weight_decay": _optimizer("weight_decay", 0.1),
    "optimizer.grad_clip": _optimizer("grad_clip", 0.5),
    "critic.path": Seen("critic", lambda run: Path(run.critic.model["path"]).name, "critic", PPO),
    "critic.lr": Seen(0.02, lambda run: (run.critic.optimizer.lr, run.actor.optimizer.lr), (0.02, 0.1), PPO),
    "critic.warmup_steps": Seen(3, lambda run: (run.updates("actor"), run.updates("critic")), (STEPS - 3, STEPS), PPO),
    "reference.path": Seen(
        "reference",
        lambda run: [role for role, spec in run.asked.trainers.items() if spec.model["path"].endswith("/reference")],
        ["reference"],
        {"algorithm": {"name": "grpo", "kl_coef": 0.1}},
    ),
    "batch.updates_per_step": Seen(2, lambda run: run.updates("actor"), 2 * STEPS),
    "batch.passes": Seen(3, lambda run: run.updates("actor"), 3 * STEPS),
    "eval.every": Seen(1, lambda run: run.evaluated("step"), list(range(STEPS + 1)), EVALUATES),
    "eval.at_start": Seen(False, lambda run: run.evaluated("step"), [2, 4], EVALUATES),
    "eval.samples": Seen(3, lambda run: set(run.evaluated("count")), {12}, EVALUATES),
    "eval.size": Seen(5, lambda run: set(run.evaluated("count")), {5}, EVALUATES),
    "eval.temperature": Seen(
        0.25, lambda run: run.of_requests("temperature"), {0.25, 1.0}, {"eval": {"every": 2, "size": 4}}
    ),
    "eval.sets.temperature": Seen(
        0.25, lambda run: run.of_requests("temperature"), {0.25, 1.0}, {"eval": {"every": 2}}
    ),
    "eval.sets.samples": Seen(3, lambda run: set(run.evaluated("count")), {48}, {"eval": {"every": 2}}),
    "eval.sets.max_new_tokens": Seen(
        2,
        lambda run: run.of_requests("max_new_tokens"),
        {2, 4},
        {"eval": {"every": 2}, "rollout": {"max_new_tokens": 4}},
    ),
    "eval.sets.size": Seen(5, lambda run: set(run.evaluated("count")), {5}, {"eval": {"every": 2}}),
    "eval.sets.name": Seen("own", lambda run: set(run.evaluated("set_name")), {"own"}, {"eval": {"every": 2}}),
    "eval.sets.columns": Seen({"prompt": "question"}, _questions, {"p", "q"}, {"eval": {"every": 2}}),
    "eval.sets.path": Seen("other.jsonl", _questions, {"p", "o"}, {"eval": {"every": 2}}),
    "rewards.weight": Seen(3.0, _weight, {3.0}),
    "rewards.label": Seen("own", lambda run: any(run.outcome.metric("reward/own")), True),
}
LORA: dict[str, Any] = {
    "rank": 4, "alpha": 8.0, "targets": ["q_proj"], "dropout": 0.1, "rslora": True, "dora": True,
    "modules_to_save": ["embed_tokens"], "export_adapter": False,
}  # fmt: skip
SEEN |= {  # the trainer is told; what it makes of them, its own tests show
    f"model.lora.{name}": Seen(value, lambda run, name=name: (run.actor.model.get("lora") or {}).get(name), value)
    for name, value in LORA.items()
}
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")
TOGETHER = (
    {"model.freeze"}
    | {f"model.{name}" for name in ("tokenizer", "tool_calls", "chat_template")}
    | {"model.chat_template_kwargs", "model.chat_template_date"},
    {name for name in SEEN if name.startswith("model.lora.")},
    {name for name in SEEN if name.startswith("optimizer.")},
    {name for name in SEEN if name.startswith("critic.")},
    {"seed", "deterministic", "rollout.dtype"} | {f"rollout.{name}" for name in SAMPLING},
)
"""Settings that are set in one run, since none changes what shows another."""
TEACHER, ENVIRONMENTS = "tests/unit/roles/test_teacher.py", "tests/unit/roles/test_environments.py"
ELSEWHERE = {
    "epochs": "tests/unit/control/test_epochs.py::test_steps_take_as_many_tasks_as_the_epochs_have",
    "model.routing_replay": "tests/graph/test_experts.py::test_a_mixture_of_experts_is_trained_with_the_experts_of_its_rollout",
    "model.head_dtype": "plugins/relax-plugin-torch/tests/test_precision.py"
    "::test_a_float32_head_keeps_what_bfloat16_rounds_away_and_publishes_the_same_bits",
    "teachers.path": f"{TEACHER}::test_every_row_has_the_columns_of_its_own_teacher",
    "teachers.only": f"{TEACHER}::test_every_row_has_the_columns_of_its_own_teacher",
    "teachers.dtype": f"{TEACHER}::test_one_teacher_scores_all_rows_without_rewards",
    "teachers.engine": "tests/graph/test_engine_pools.py::test_a_judge_and_a_teacher_take_turns_with_colocated_engines",
    "rollout.late": "tests/unit/roles/test_schedule.py::test_every_late_rule_keeps_the_bound_and_the_account",
    "optimizer.not_finite": "tests/unit/roles/test_guard.py::test_a_bad_update_stops_the_run_if_configured",
    "rewards.only": "tests/unit/rewards/test_scorer.py::test_a_reward_judges_only_the_tasks_it_applies_to",
    "environments.label": f"{ENVIRONMENTS}::test_environments_of_one_component_are_distinguished_by_their_labels",
    "environments.algorithm": f"{ENVIRONMENTS}::test_rows_have_the_algorithm_of_their_task_s_environment",
}
NOT_LEARNT = {
    "plugins": "names files of components",
    "autoscale": "how many engines there are; plugins/relax-plugin-scaling/tests/test_limits.py",
    "engines": "how other models are asked; what they answer is a reward's or a teacher's",
    "data.media": "where media may come from",
    "rollout.spare_groups": "which groups a step has; tests/unit/bus/test_rule.py",
    "rollout.refill_limit": "when a run gives up",
    "rollout.failure_limit": "when a run gives up",
    "data.max_bad_golds": "whether a run starts",
    "eval.max_overlap": "whether a run starts",
    "rollout.media_store_mb": "what is kept on disk",
    "rollout.turn_timeout_s": "when a sample is given up",
    "rollout.step_timeout_s": "when a step is given up",
    "batch.tokens_per_micro_batch": "results do not depend on it; the trainers' conformance",
    "batch.stream": "results do not depend on it; tests/unit/roles/test_streaming.py",
    "placement": "where it runs",
    "checkpoint": "what is kept",
    "export": "what is kept; tests/unit/roles/test_exports.py",
    "profile": "what is recorded; tests/unit/roles/test_profile.py",
    "recovery": "what follows a fault",
    "guards": "what follows a divergence; tests/unit/roles/test_divergence.py",
    "run": "its name and surroundings",
    "plugin_tables": "read by the plugins that own them, whose tests set each key",
    "rewards.timeout_s": "when a reward is given up",
    "rewards.memory_mb": "when a reward is given up",
    "rewards.inherit_env": "what the process of a reward may read",
    "rewards.writable": "what the process of a reward may change; tests/unit/runners/test_keeper.py",
    **{
        f"{table}.{key}": "how an environment is hosted, and when a sample is given up"
        for table, skipped in (("environment", ()), ("environments", ("label", "algorithm")))
        for key in COMPONENT_TABLES[table][0].model_fields
        if key not in skipped
    },
    "media": "when a medium is given up, and what is kept of it",
    "weights": "how weights travel; what arrives is proved to be what was sent",
    "sandbox": "how many programs run at once",
    "engine.python": "where it runs",
    "trainer.python": "where it runs",
}


def _tables(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a field holds, alone, in a list, or perhaps."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for part in typing.get_args(annotation) for table in _tables(part)]


def _settings(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a table and of those within it, with dots."""
    for name, info in table.model_fields.items():
        within = _tables(info.annotation)
        if within:
            yield from _settings(within[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_setting_is_seen_or_is_known_not_to_change_what_is_learnt() -> None:
    settings = set(_settings(Core))
    settings |= {f"{table}.{key}" for table, (keys, _) in COMPONENT_TABLES.items() for key in keys.model_fields}
    known = {name for name in settings for part in NOT_LEARNT if name == part or name.startswith(f"{part}.")}
    new = sorted(settings - known - SEEN.keys() - ELSEWHERE.keys())
    assert not new, f"show in SEEN what {new} govern, name a test in ELSEWHERE, or give the reason in NOT_LEARNT"
    assert not (SEEN.keys() | ELSEWHERE.keys()) - settings, "these are no settings any more"
    assert not known & (SEEN.keys() | ELSEWHERE.keys()) and not SEEN.keys() & ELSEWHERE.keys(), "said twice"


@pytest.mark.parametrize("where", sorted(set(ELSEWHERE.values())))
def test_every_test_named_for_a_setting_exists(where: str) -> None:
    path, _, name = where.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Observed]:
    """Run with some settings and return what workers were given. Equal settings run once."""
    seen: dict[str, Observed] = {}

    def run(**settings: Any) -> Observed:
        key = json.dumps(settings, sort_keys=True)
        if key not in seen:
            with pytest.MonkeyPatch.context() as patch:
                asked = record_calls(patch)
                seen[key] = Observed(asked, SimulatedRun(tmp_path_factory.mktemp("run"), **settings).run())
        return seen[key]

    return run


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with task files, and one with rows of a dataset: `given.jsonl`."""
    folder = tmp_path_factory.mktemp("tasks")
    written = {
        "both": [{"prompt": f"p{at}", "question": f"q{at}", "answer": "x"} for at in range(16)],
        "other": [{"prompt": f"o{at}"} for at in range(16)],
        "chats": [{"prompt": [{"role": "user", "content": f"p{at}"}]} for at in range(16)],
        "given": [{"prompt": f"p{at}", "completion": "yes"} for at in range(16)],
    }
    for name, rows in written.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _merged(values: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return `beside` as tables, with these settings set."""
    merged = {"steps": STEPS, **json.loads(json.dumps(beside))}
    for setting, value in values.items():
        *tables, name = setting.split(".")
        table = merged
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    return merged


@pytest.mark.parametrize("setting", SEEN)
def test_a_setting_is_seen_in_what_it_governs(setting: str, observe: Callable[..., Observed], tasks: Path) -> None:
    seen, value = SEEN[setting], SEEN[setting].value
    if setting.endswith((".path", ".train")):
        value = str(tasks / value)
    beside = json.loads(json.dumps(seen.beside))
    if "train" in beside.get("data", {}):
        beside["data"]["train"] = str(tasks / beside["data"]["train"])
    table, _, key = setting.rpartition(".")
    if table == "eval.sets":
        held = {"name": "held", "path": str(tasks / "both.jsonl")}
        plain = {**beside, "eval": {**beside["eval"], "sets": [held]}}
        changed = {**beside, "eval": {**beside["eval"], "sets": [{**held, key: value}]}}
        before, after = observe(steps=STEPS, **plain), observe(steps=STEPS, **changed)
    elif table == "rewards":
        before, after = observe(steps=STEPS), observe(steps=STEPS, rewards=[{"name": "scripted-reward", key: value}])
    else:
        group = next((names for names in TOGETHER if setting in names), ())
        values = {name: SEEN[name].value for name in SEEN if name in group} or {setting: value}
        before, after = observe(**{"steps": STEPS, **beside}), observe(**_merged(values, beside))
    assert seen.see(after) == seen.want
    assert seen.see(before) != seen.want, "it is so without the setting, and shows nothing"
