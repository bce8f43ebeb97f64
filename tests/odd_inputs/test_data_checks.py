# SPDX-License-Identifier: Apache-2.0
"""`relax data check`, `--dry-run` and the run itself refuse and skip the same rows, in RL and in supervised training."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from relax_core.api import ConfigError, Sampler, Task
from relax_core.api.algorithm import Source
from relax_core.cli.main import app
from relax_core.config.compose import compose
from relax_core.control import data_identity
from relax_core.control.data_check import open_data
from relax_core.control.planner import plan
from relax_core.control.prepare import prepare, prepare_resume
from relax_core.sampling.groups import Selection, make_sampler
from tests.ascii_tokenizer import save_ascii_tokenizer

ROWS = [
    {"prompt": "1+1=", "answer": "2", "kind": "sum"},
    {"prompt": "2+2=", "answer": "4", "kind": "sum"},
    {"prompt": "x" * 50, "answer": "?", "kind": "long"},
]


@pytest.fixture(autouse=True)
def _imports_no_backend(monkeypatch):
    monkeypatch.setattr("relax_core.control.dry_run.check_starts", lambda *_: ())


@pytest.fixture
def folder(tmp_path):
    save_ascii_tokenizer(tmp_path / "model")
    config = {"eos_token_id": 0, "model_type": "qwen3", "max_position_embeddings": 64, "vocab_size": 127}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def configured(folder, *lines, rows=ROWS, rewards='rewards = ["exact"]'):
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = [rewards, "[model]", 'path = "model"', "[rollout]", "max_new_tokens = 20", "[eval]", "every = 0",
            "[data]", 'train = "tasks.jsonl"', *lines]  # fmt: skip
    (folder / "run.toml").write_text("\n".join(text))
    return folder / "run.toml"


def checked(file):
    """Return what `relax data check` says: {"usable", "skipped", reasons of bad rows}."""
    result = CliRunner().invoke(app, ["data", "check", str(file), "--json"])
    reports = json.loads(result.stdout)["files"]
    bad = [f"{row['where']}: {row['reason']}" for report in reports for row in report["bad"]]
    assert result.exit_code == (2 if bad else 0)
    return sum(report["usable"] for report in reports), sum(report["skipped"] for report in reports), bad


def opened(file):
    composed = compose([file])
    return open_data(composed.config, composed.catalogue, plan(composed.config, composed.catalogue))


def dry(file):
    return CliRunner().invoke(app, ["train", str(file), "--dry-run"])


def test_a_row_too_long_for_the_context_is_skipped_everywhere(folder):
    file = configured(folder)
    assert checked(file) == (2, 1, [])
    assert (len(opened(file).train), opened(file).rows.num_skipped) == (2, 1)
    result = dry(file)
    assert result.exit_code == 0 and "2 tasks, 1 skipped as too long" in result.stdout


SOME = '[[rewards]]\nname = "exact"\nonly = "{}"'
REFUSED = {
    "a missing column": ((), [*ROWS[:1], {"prompt": "q", "kind": "sum"}], 'rewards = ["exact"]', "tasks.jsonl:2"),
    "a missing column of some tasks": (
        (), [*ROWS[:1], {"prompt": "q", "kind": "sum"}], SOME.format("kind=sum"), "tasks.jsonl:2",
    ),
    "a renamed column that no row has": (
        ('columns = {level = "lvl"}',), ROWS, 'rewards = ["exact"]', "no row has the column 'lvl'",
    ),
    "a filter that selects no row": (
        (), ROWS, SOME.format("kind=smu") + "\n" + SOME.format("otherwise") + '\nlabel = "b"', "kind=smu",
    ),
    "a row that no reward judges": ((), ROWS[:2] + [{**ROWS[0], "kind": "law"}], SOME.format("kind=sum"), "tasks.jsonl:3"),
    "a row of an unknown environment": (
        ("[[environments]]", 'name = "single-turn"', 'label = "other"'), [{**ROWS[0], "environment": "nowhere"}],
        'rewards = ["exact"]', "names 'nowhere'",
    ),
    "a column without a plain form that a reward reads": (
        (), [{"prompt": "q", "answer": "\ud83d"}], 'rewards = ["exact"]', "'answer' holds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_a_run_refuses_is_refused_before_the_run(folder, name):
    lines, rows, rewards, reason = REFUSED[name]
    if "[[rewards]]" in rewards:
        lines, rewards = (*lines, rewards), ""
    file = configured(folder, *lines, rows=rows, rewards=rewards)
    assert any(reason in bad for bad in checked(file)[2])
    with pytest.raises(ConfigError) as caught:
        opened(file)
    assert reason in str(caught.value)
    result = dry(file)
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)


def test_values_that_cannot_be_passed_on_are_named_by_the_check_and_by_the_run(folder):
    file = configured(folder, rows=[ROWS[0], {**ROWS[1], "rubric": "\ud83d"}])
    said = f"column 'rubric' has 1 values that tasks can't hold, the first at {folder}/tasks.jsonl:2: 'rubric' holds \\ud83d"
    assert checked(file) == (2, 0, [])
    assert said in CliRunner().invoke(app, ["data", "check", str(file)]).stdout
    assert said in CliRunner().invoke(app, ["data", "check", str(folder / "tasks.jsonl")]).stdout
    data = opened(file)
    assert said in data.rows.remarks(data.train)[0]


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_small_file_is_used_by_default_and_its_numbers_are_a_warning_everywhere(folder, algorithm):
    rows = [{"prompt": f"{at}", "answer": "2", "completion": "2"} for at in range(32)]
    rewards = 'rewards = ["exact"]' if algorithm == "grpo" else ""
    file = configured(folder, rows=rows, rewards=f'algorithm = "{algorithm}"\n{rewards}')
    file.write_text(file.read_text().replace("every = 0", "every = 20"))
    said = "32 tasks: 3 are held out, 0 equal a held-out task, 29 remain to train on, and a step takes 32"
    assert f"data: warning: {said}" in dry(file).output
    assert f"warning  {said}" in CliRunner().invoke(app, ["data", "check", str(file)]).output
    file.write_text(file.read_text().replace("every = 20", "size = 32"))
    assert "eval.size: got 32 of 32 tasks" in str(dry(file).exception)
    assert "got 32 of 32 tasks; leave at least one" in CliRunner().invoke(app, ["data", "check", str(file)]).output


def test_the_sets_of_an_evaluation_are_checked_with_the_names_that_they_inherit(folder):
    lines = ('columns = {answer = "solution"}', "[[eval.sets]]", 'name = "a"', 'path = "tasks.jsonl"')
    file = configured(folder, *lines, rows=[{"prompt": "q", "solution": "1"}])
    assert checked(file) == (2, 0, [])


def test_a_reward_for_one_evaluation_set_reads_only_the_answers_of_that_set(folder):
    for name in ("one", "two"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "q", "answer": "no option"}\n')
    sets = "".join(f'[[eval.sets]]\nname = "{name}"\npath = "{name}.jsonl"\n' for name in ("one", "two"))
    own = '[[rewards]]\nname = "multiple-choice"\nonly = "eval_set=one"\n'
    rest = '[[rewards]]\nname = "repetition"\nonly = "otherwise"\n'
    file = configured(folder, sets + own + rest, rewards="")
    assert [one.partition(": ")[0] for one in checked(file)[2]] == [f"{folder}/one.jsonl:1"]


def test_rows_that_evaluation_shares_are_shown_and_refused_alike_everywhere(folder):
    (folder / "held.jsonl").write_text('{"prompt": " 1+1 =", "answer": "2"}\n{"prompt": "3+3=", "answer": "6"}\n')
    sets = ("[[eval.sets]]", 'name = "held"', 'path = "held.jsonl"')
    rows = [*ROWS[:2], {**ROWS[0], "prompt": "1 + 1 ="}]
    file = configured(folder, *sets, rows=rows)
    text = file.read_text()
    file.write_text(text.replace("every = 0", "every = 1\nmax_overlap = 0.5"))
    result = CliRunner().invoke(app, ["data", "check", str(file)])
    shared = f"1 of 2 tasks are also in data.train: {folder}/held.jsonl:1 and {folder}/tasks.jsonl:1"
    assert result.exit_code == 0 and shared in result.stdout
    assert f"1 of 3 rows repeat an earlier row: {folder}/tasks.jsonl:3 and {folder}/tasks.jsonl:1" in result.stdout
    assert shared in dry(file).stdout
    file.write_text(text.replace("every = 0", "every = 1\nmax_overlap = 0.4"))
    assert any(shared in bad for bad in checked(file)[2])
    with pytest.raises(ConfigError, match=r"eval\.sets\.0\.path.*max_overlap = 0\.4"):
        opened(file)


def test_a_file_alone_is_searched_for_repeated_rows(folder):
    (folder / "tasks.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "A b."}\n')
    (report,) = json.loads(CliRunner().invoke(app, ["data", "check", str(folder / "tasks.jsonl"), "--json"]).stdout)[
        "files"
    ]
    assert [one["first"] for one in report["overlap"]["repeated"]] == [f"{folder / 'tasks.jsonl'}:1"]


SFT = ('[algorithm]\nname = "sft"',)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (('columns = {completion = "reply"}',), "no row has the column 'reply'"),
        (("[sampler]", 'name = "success-rate"'), "it learns from rewards"),
        (("[sampler]", 'name = "mixture"', "weights = {nothing = 1}"), "sampler.weights"),
    ],
)
def test_supervised_training_checks_columns_and_samplers_as_rl_does(folder, lines, reason):
    rows = [{"prompt": "q", "completion": "a", "source": "s"}] * 3
    with pytest.raises(ConfigError) as caught:
        opened(configured(folder, *lines, *SFT, rows=rows, rewards=""))
    assert reason in str(caught.value)


def test_a_share_of_zero_is_not_sampled_in_supervised_training(folder):
    lines = ("[sampler]", 'name = "mixture"', "weights = {b = 0}", *SFT)
    rows = [{"prompt": "q", "completion": "a", "source": source} for source in "abab"]
    file = configured(folder, *lines, rows=rows, rewards="")
    composed, data = compose([file]), opened(file)
    sampler = make_sampler(composed.config, composed.catalogue.build, Source.DATASET)
    selection = Selection(sampler, {}, data.rows, data.train, 0, 0)
    assert {selection.task(group) for group in range(20)} == {0, 2}


def test_the_plan_says_that_filters_have_no_effect_on_a_dataset(folder):
    lines = ("[[filters]]", 'name = "zero-variance"', *SFT)
    file = configured(folder, *lines, rows=[{"prompt": "q", "completion": "a"}] * 2, rewards="")
    assert "filters judge samples" in dry(file).stdout


def test_the_order_of_the_file_is_that_of_every_source(folder):
    file = configured(folder, "shuffle = false")
    composed = compose([file])
    assert make_sampler(composed.config, composed.catalogue.build, Source.DATASET).pick(4, 3, 0) == 1


# -- identity ---------------------------------------------------------------------------------------------------------


def run_of(path, *sets):
    tables = [SimpleNamespace(path=other) for other in sets]
    data, model = SimpleNamespace(train=path), SimpleNamespace(chat_template="{{ text }}")
    return SimpleNamespace(data=data, eval=SimpleNamespace(sets=tables), model=model)


def test_a_changed_task_file_is_refused_with_the_ways_to_continue(tmp_path):
    train, held = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    train.write_text("1\n2\n"), held.write_text("3\n")
    known = data_identity.check_unchanged(run_of(train, held), {}, tmp_path)
    assert data_identity.check_unchanged(run_of(train, held), known, tmp_path) == known
    held.write_text("4\n")  # of the same size
    with pytest.raises(ConfigError, match=r"eval\.sets\.0\.path: .*b\.jsonl, which has changed") as caught:
        data_identity.check_unchanged(run_of(train, held), known, tmp_path)
    assert "export" in caught.value.fix and "data.json" in caught.value.fix
    train.unlink()
    with pytest.raises(ConfigError, match=r"data\.train: .*a\.jsonl: No such file"):
        data_identity.check_unchanged(run_of(train), known, tmp_path)


def test_the_content_of_a_folder_covers_names_and_files_but_no_caches(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.parquet").write_bytes(b"1")
    before = data_identity.content_of(tmp_path)
    (tmp_path / "x/cache-1.arrow").write_bytes(b"1")
    assert data_identity.content_of(tmp_path) == before
    (tmp_path / "x/a.parquet").rename(tmp_path / "x/b.parquet")
    assert data_identity.content_of(tmp_path) != before


def test_the_ends_of_a_large_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data_identity, "PART_BYTES", 4)
    monkeypatch.setattr(data_identity, "MAX_PARTS", 3)
    path = tmp_path / "large"
    digests = set()
    for at in (None, 0, 50, 99):
        content = bytearray(100)
        if at is not None:
            content[at] = 1
        path.write_bytes(content)
        digests.add(data_identity.content_of(path)["digest"])
    assert len(digests) == 4


@pytest.mark.parametrize("name", ["tasks.jsonl", "own.jinja"])
def test_a_resume_with_another_file_is_refused_before_the_run_is_touched(folder, name):
    (folder / "own.jinja").write_text("{{ messages }}")
    prepared = prepare(
        [configured(folder)], ["model.chat_template=" + str(folder / "own.jinja")], run_dir=folder / "run"
    )
    prepared.directory.close()
    status = folder / "run/status.json"
    (folder / name).write_text((folder / name).read_text().replace("2", "3").replace("messages", "message"))
    with pytest.raises(ConfigError, match=r"which has changed since the run began"):
        prepare_resume(folder / "run", [], unfinished=True)
    assert not status.exists()
    (folder / "run/data.json").unlink()
    prepare_resume(folder / "run", [], unfinished=True).directory.close()
    assert (folder / "run/data.json").exists()


# -- what the plan and the messages say -------------------------------------------------------------------------------


def test_dropped_options_are_named_where_the_plan_is_printed(folder):
    file = configured(folder, "[algorithm]", 'name = "grpo"', "kl_coef = 0.1")
    result = CliRunner().invoke(app, ["train", str(file), "--dry-run", 'algorithm={name="dapo"}'])
    assert result.exit_code == 0 and "dropped kl_coef" in result.output
    result = CliRunner().invoke(app, ["graph", str(file), "algorithm.name=dapo"])
    assert "dropped kl_coef" in result.output


def test_a_key_that_may_not_change_on_resume_names_those_that_may_and_the_way(tmp_path):
    with pytest.raises(ConfigError) as caught:
        prepare_resume(tmp_path, ["optimizer.lr=1"])
    assert "data.media" in caught.value.fix and f"model.path={tmp_path}/export" in caught.value.fix
    shown = CliRunner().invoke(app, ["resume", "--help"], terminal_width=200).output
    assert "recovery" in shown and "guards" in shown


class Reader(Sampler):
    def open(self, tasks):
        self.read = [tasks[index] for index in range(len(tasks))]

    def pick(self, group, num_tasks, seed):
        return group % num_tasks


def test_a_sampler_sees_the_rows_of_a_dataset(folder):
    data = opened(configured(folder, *SFT, rows=[{"prompt": "q", "completion": "a"}] * 2, rewards=""))
    sampler = Reader()
    Selection(sampler, {}, data.rows, data.train, 0, 0)
    assert len(sampler.read) == 2 and isinstance(sampler.read[0], Task)
