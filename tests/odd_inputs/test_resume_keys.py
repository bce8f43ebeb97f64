# SPDX-License-Identifier: Apache-2.0
"""No key that a resume may change decides which tasks are trained: the change is refused, or the tasks stay the same."""

import asyncio
import inspect
import json
import shutil
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from relax_core.api.algorithm import Source
from relax_core.api.errors import ConfigError
from relax_core.api.options import Options
from relax_core.api.role import SystemClock
from relax_core.api.weights import Version
from relax_core.bus.service import open_bus
from relax_core.bus.store import InProcessBus
from relax_core.config.run_config import RunConfig
from relax_core.config.tables import EvalTable
from relax_core.control.data_check import PlanContext
from relax_core.control.data_identity import held_out_before
from relax_core.control.prepare import prepare, prepare_resume
from relax_core.control.resume_keys import MAY_CHANGE, may_change
from relax_core.data.dataset import open_held_out
from relax_core.data.overlap import EvalRows, kept_apart
from relax_core.roles.source import _open_apart
from relax_core.runners.launch import bus_settings
from relax_core.sampling.evaluation import open_tasks
from relax_core.sampling.groups import Selection, make_sampler
from tests.ascii_tokenizer import save_ascii_tokenizer

TASKS, HELD_OUT = 12, 4
CHANGES = {
    "data.media.allowed_hosts": '["example.org"]',
    "data.media.allowed_folders": '["."]',
    "eval.max_overlap": "0.9",
    "eval.sets": '[{name = "own", path = "other.jsonl"}]',
    "eval.size": "129",
    "placement.mode": '"async"',
    "placement.rollout.share": '"own"',
    "placement.rollout.external.addresses": "",  # no engine outside this machine can be named without one
    "placement.rollout.external.token": "",
    "placement.rollout.min_engines": "1",
    "placement.rollout.gpus_per_engine": "0",
    "placement.rollout.prelaunch": "",  # needs an environment with several turns
    "placement.rollout.sessions": "8",
    "placement.rollout.kv_reserve": "0.5",
    "placement.rollout.kv_tokens_per_engine": "1000",
    "placement.roles": "",  # roles of plugins
    "placement.elastic_labels": "",  # needs Ray
    **{
        f"placement.critic.{key}": "" for key in ("ranks", "gpus_per_rank", "threads", "share")
    },  # only PPO has a critic
    "guards.entropy.ratio": "0.5",
    "guards.reward.ratio": "0.5",
    "placement.check_memory": "false",
    "profile.steps": "[4]",
    "profile.ranks": "[0]",
    "run.name": '"other"',
    "run.tags": '["a"]',
    "run.notes": '"b"',
    "run.env": '{A = "b"}',
    "run.runner": '"inline"',
    "sinks": "[]",
}
"""Other values of keys for which no value follows from their type; empty: a key that cannot change here."""


def leaves(model, prefix=""):
    """Yield each key of a configuration model with its type and its default."""
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Options):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation, field.default


def changed(key, kind, default):
    """Return an override that changes a key, or None."""
    if key in CHANGES:
        return f"{key}={CHANGES[key]}" if CHANGES[key] else None
    if get_origin(kind) is Literal:
        return f'{key}="{next(value for value in get_args(kind) if value not in ("", default))}"'
    if kind is bool:
        return f"{key}={str(not default).lower()}"
    if kind in (int, float):
        return f"{key}={default + 1}"
    assert float in get_args(kind) or "float" in str(kind), f"{key}: add another value of this key to CHANGES"
    return f"{key}={1.0 if default is None else default + 1}"


KEYS = {key: changed(key, kind, default) for key, kind, default in leaves(RunConfig) if may_change(key)}
GROUPS, AHEAD, STEP = 4, 3, 3
KINDS = {"rollout": ["rewards=['exact']"], "dataset": ["algorithm=sft"]}


def opened(prepared, run_dir=None):
    """Open the data as the roles of the run do; return the rows, the picks, and the evaluation sets by name."""
    stage = prepared.stages[0]
    config, catalogue = stage.config, prepared.catalogue
    context = PlanContext(
        config, stage.launch.plan, catalogue.build, stage.launch.run_dir if run_dir is None else run_dir
    )
    if context.plan.source is Source.ROLLOUT:
        family = catalogue.build(config.family.chosen)
        family.open(config.model.model_dump(mode="json"))
        rows, train, sets = open_tasks(context, family, {})
        found = {one.name: EvalRows(one.tasks, one.indices) for one in sets}
        train, _ = kept_apart(config, rows, train, found)
    else:
        rows, train, _ = _open_apart(context)
        sets = open_held_out(config, catalogue.build, context.plan.source, context.run_dir)
        found = {one.name: EvalRows(one.dataset, one.indices) for one in sets}
    sampler = make_sampler(config, catalogue.build, context.plan.source)
    return rows, Selection(sampler, {}, rows, train, config.seed, 0), found


async def bus_of(prepared, version):
    launch = prepared.stages[0].launch
    return await open_bus(InProcessBus(), bus_settings(launch), launch.run_dir, version, SystemClock())


async def trained(prepared, step):
    """Train three steps if `step` is 0, else restore; return the rows of the groups of the following steps."""
    rows, selection, _ = opened(prepared)
    bus = await bus_of(prepared, Version("actor", step, step))
    first = step * GROUPS
    await selection.restore(bus)
    if not step:
        for group in range(STEP * GROUPS + AHEAD):
            selection.task(group)
        await selection.keep(bus)
        bus.queue.version = Version("actor", 0, STEP)
        point = Path(prepared.stages[0].launch.run_dir) / f"checkpoints/step-{STEP:06d}"
        await bus.checkpoint(STEP, str(point))
        (point / "state.json").write_text(json.dumps({"schema": 1, "step": STEP, "incarnation": 0}))
        first = STEP * GROUPS
    await bus.close()
    return [rows.where(selection.task(group)) for group in range(first, first + 3 * TASKS)]


@pytest.fixture(scope="module", params=KINDS)
def begun(request, tmp_path_factory):
    """Return a run after three steps, and the rows that it would train next."""
    folder = tmp_path_factory.mktemp(request.param)
    save_ascii_tokenizer(folder / "model")
    config = {"eos_token_id": 0, "model_type": "qwen3", "max_position_embeddings": 64, "vocab_size": 127}
    (folder / "model/config.json").write_text(json.dumps(config))
    (folder / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rows = [{"prompt": f"{at}+1=", "answer": "2", "completion": "2", "source": "ab"[at % 2]} for at in range(TASKS)]
    for name, written in (
        ("tasks", rows * 2),
        ("other", [rows[0], {**rows[0], "prompt": "other"}]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    layer = {
        "model": {"path": str(folder / "model")}, "data": {"train": str(folder / "tasks.jsonl")}, "sampler": "mixture",
        "rollout": {"groups_per_step": GROUPS, "group_size": 2, "max_new_tokens": 20}, "steps": STEP,
        "eval": {"size": HELD_OUT},
    }  # fmt: skip
    prepared = prepare([layer], KINDS[request.param], run_dir=folder / "run")
    prepared.directory.close()
    wanted = asyncio.run(trained(prepared, 0))
    return folder / "run", wanted


def resumed(run, folder, *changes):
    """Return the rows that a copy of a run trains after a resume with changes."""
    copy = shutil.copytree(run, folder / "run")
    changes = [each.replace("other.jsonl", str(run.parent / "other.jsonl")) for each in changes]
    prepared = prepare_resume(copy, changes, unfinished=True)
    prepared.directory.close()
    return asyncio.run(trained(prepared, STEP))


def test_the_keys_with_a_case_are_those_that_a_resume_may_change():
    assert set(CHANGES) <= set(KEYS), "remove the cases of keys that no longer exist or may no longer change"
    assert {key.partition(".")[0] for key in KEYS} == {name.partition(".")[0] for name in MAY_CHANGE}


def test_a_resume_with_other_values_of_all_keys_but_the_evaluation_trains_the_same_tasks(begun, tmp_path):
    run, wanted = begun
    left_out = ("eval.", *(("guards.rollout_kl", "guards.reward", "guards.mismatch") if "dataset" in str(run) else ()))
    assert (
        resumed(run, tmp_path, *(each for key, each in KEYS.items() if each and not key.startswith(left_out))) == wanted
    )


EVALUATIONS = {
    "nothing": [],
    "all keys": [each for key, each in KEYS.items() if key.startswith("eval.")],
    "off": ["eval.every=0"],
    "off with another size": ["eval.every=0", "eval.size=7"],
    "own sets": [KEYS["eval.sets"]],
    "own sets with another size": [KEYS["eval.sets"], "eval.size=3"],
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_resume_with_another_evaluation_trains_the_same_tasks(begun, tmp_path, name):
    run, wanted = begun
    assert resumed(run, tmp_path, *EVALUATIONS[name]) == wanted


def test_the_rows_that_a_resume_evaluates_are_those_that_were_held_out_and_no_equal_row_is_trained(begun, tmp_path):
    run, wanted = begun
    prepared = prepare_resume(shutil.copytree(run, tmp_path / "run"), ["eval.every=9"], unfinished=True)
    prepared.directory.close()
    _, _, sets = opened(prepared)
    rows, indices = sets["held-out"]
    assert indices == opened(prepared, run_dir="")[2]["held-out"].indices, "these were drawn when the run began"
    held = {int(rows.where(index).rpartition(":")[2]) for index in indices}
    trained = {int(row.rpartition(":")[2]) for row in wanted}
    equal = {row + more for row in held for more in (-TASKS, TASKS)}
    assert len(held) == HELD_OUT and trained == {*range(1, 2 * TASKS + 1)} - held - equal


def test_a_run_of_an_earlier_version_keeps_the_tasks_that_its_configuration_held_out(begun, tmp_path):
    run, wanted = begun
    earlier = shutil.copytree(run, tmp_path / "earlier")
    (earlier / "held-out.json").unlink()
    config = (earlier / "config.toml").read_text()
    assert 'name = "chat"' in config, "the family was a component of the core"
    (earlier / "config.toml").write_text(config.replace('name = "chat"', 'name = "relax-core:chat"'))
    (earlier / "plugins.json").write_text('{"plugins": [{"name": "relax-core", "version": "0.1.0", "hash": ""}]}')
    shutil.copy(run.parent / "other.jsonl", tmp_path)
    assert resumed(earlier, tmp_path, "eval.every=0") == wanted
    prepare_resume(tmp_path / "run", ["eval.every=9"], unfinished=True).directory.close()
    with pytest.raises(ConfigError, match="began with 4"):
        prepare_resume(tmp_path / "run", ["eval.size=9"], unfinished=True)


@pytest.mark.parametrize(
    ("later", "steps", "undone"), [(True, STEP, True), (False, STEP + 2, True), (False, STEP, False)]
)
def test_a_resume_sets_the_export_of_undone_steps_aside(begun, tmp_path, later, steps, undone):
    run = shutil.copytree(begun[0], tmp_path / "run")
    if later:
        shutil.copytree(run / f"checkpoints/step-{STEP:06d}", run / f"checkpoints/step-{STEP + 1:06d}")
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace(f"steps = {STEP}\n", f"steps = {steps}\n")
    )
    (run / "export").mkdir()
    (run / "undone-export").mkdir()
    (run / "export/config.json").touch()
    for name in ("summary.json", "report.html", "reward.png"):
        (run / name).write_text('{"status": "finished"}')
    prepared = prepare_resume(run, ["steps=9"], STEP)
    prepared.directory.close()
    assert [(run / name / "config.json").exists() for name in ("export", "undone-export")] == [not undone, undone]
    assert ("the export of later steps is kept as undone-export, which you may delete" in prepared.notices) == undone
    assert (run / f"checkpoints/undone-{STEP + 1:06d}").exists() == later
    assert not any((run / name).exists() for name in ("summary.json", "report.html", "reward.png"))


@pytest.mark.parametrize(
    ("former", "present", "held"),
    [
        ({"every": 0}, {"every": 0}, 0), ({"every": 0}, {"every": 1}, "refused"), ({"every": 2}, {"every": 1}, None),
        ({"sets": True}, {"size": 3, "sets": True}, 0), ({"sets": True}, {}, "refused"), ({"size": 3}, {"sets": True}, 3),
        ({"size": 3}, {}, 3),
    ],
)  # fmt: skip
def test_a_run_holds_out_the_tasks_that_it_began_with_or_the_change_is_refused(tmp_path, former, present, held):
    sets = ({"name": "own", "path": "other.jsonl"},)
    tables = [EvalTable(**{**table, "sets": sets if table.get("sets") else ()}) for table in (former, present)]
    if held == "refused":
        with pytest.raises(
            ConfigError, match=r"eval\.size: got a tenth of the tasks.*name other files as \[\[eval\.sets\]\]"
        ):
            held_out_before(tmp_path, *tables)
    else:
        assert held_out_before(tmp_path, *tables) == held


@pytest.mark.parametrize("size", [HELD_OUT - 1, HELD_OUT + 1])
def test_a_resume_that_would_hold_out_other_tasks_is_refused(begun, tmp_path, size):
    run, _ = begun
    with pytest.raises(
        ConfigError, match=f"eval.size: got {size} tasks to hold out of data.train, but .* began with 4"
    ):
        resumed(run, tmp_path, f"eval.size={size}")
