# SPDX-License-Identifier: Apache-2.0
"""Where a run's files are, who may write them, and what a kill or a full disk leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import Autoscale, ClearMetrics, LogMetrics, Pause, Profile, ScaleRequest
from relax_core.control.prepare import prepare_resume
from relax_core.observe.redaction import Redactor
from relax_core.observe.run_directory import RunDirectory, find_run, run_paths, runs_root

NOW = datetime(2026, 11, 20)


def create(root, path=None, seed=1, **more):
    run = RunDirectory.create(path, "my maths.v1", NOW, Random(seed), root=root, **more)
    run.write_config("steps = 4\n")
    return run


def test_a_run_is_named_after_its_configuration_and_date_and_latest_is_the_newest(tmp_path):
    first, second = create(tmp_path), create(tmp_path)
    assert re.fullmatch(r"my-maths\.v1-20261120-[a-z]{3}", first.name)
    assert first.name != second.name
    assert (tmp_path / "latest").resolve() == second.path == find_run(None, tmp_path)
    assert os.path.getsize(first.path / ".reserve") > 0
    first.close()
    assert not (first.path / ".reserve").exists()


def test_a_run_directory_that_cannot_be_made_is_refused_without_talk_of_resuming(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run_dir: got .*file/run \(Not a directory\); name a folder") as caught:
        create(tmp_path, tmp_path / "file" / "run")
    assert "resume" not in str(caught.value)


def test_a_run_directory_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"run_dir: got .*mine, which is not empty; name a new directory$") as caught:
        create(tmp_path, tmp_path / "mine")
    assert caught.value.exit_code == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_refused_directory_with_a_checkpoint_says_how_to_continue_the_run_in_it(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"or continue the run in it with `relax resume"):
        create(tmp_path, tmp_path / "run")


def test_a_discarded_directory_leaves_its_name_free(tmp_path):
    create(tmp_path, tmp_path / "run").discard()
    assert not (tmp_path / "run").exists()
    assert create(tmp_path, tmp_path / "run").path == tmp_path / "run"


def test_an_empty_directory_may_be_named_and_a_file_may_not(tmp_path):
    (tmp_path / "empty").mkdir()
    assert create(tmp_path, tmp_path / "empty").path == tmp_path / "empty"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the path is a file"):
        create(tmp_path, tmp_path / "file")


def test_somebodys_own_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").write_text("mine")
    create(tmp_path)
    assert (tmp_path / "latest").read_text() == "mine"


def test_the_root_is_relax_runs_or_runs():
    assert runs_root({"RELAX_RUNS": "/elsewhere"}) == Path("/elsewhere")
    assert runs_root({}) == Path("runs")


def test_runs_are_found_by_path_name_and_the_start_of_a_name(tmp_path):
    one = create(tmp_path)
    assert find_run(str(one.path), tmp_path) == one.path
    assert find_run(one.name, tmp_path) == one.path
    assert find_run("my-m", tmp_path) == one.path
    create(tmp_path, seed=2)
    with pytest.raises(ConfigError, match=f"run: got my-m; .*{one.name}"):
        find_run("my-m", tmp_path)
    with pytest.raises(ConfigError, match="there: none"):
        find_run(None, tmp_path / "nowhere")
    assert len(run_paths(tmp_path)) == 2


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.toml"):
        RunDirectory.open(tmp_path)


def test_every_document_and_line_carries_its_schema(run_dir):
    for name in ("plugins", "provenance", "status", "summary", "trace"):
        run_dir.write(name, {"x": 1})
        assert json.loads((run_dir.path / f"{name}.json").read_text())["schema"] == f"relax.{name}/1"
    run_dir.append_metrics(1, 5.0, {"reward/mean": 0.5})
    run_dir.append_samples(1, [{"reward": 1.0}])
    (line,) = run_dir.metrics()
    (sample,) = run_dir.samples(1)
    assert line["schema"] == "relax.metrics/1" and sample["schema"] == "relax.sample/1"
    assert not list(run_dir.path.glob(".*json*"))


def test_rewinding_forgets_the_steps_above_the_checkpoint(run_dir):
    for step in range(1, 6):
        run_dir.append_metrics(step, 5.0, {"reward/mean": step / 10})
        run_dir.append_samples(step, [{"step_was": step}])
    run_dir.rewind(3)
    run_dir.append_metrics(4, 6.0, {"reward/mean": 9.0})
    run_dir.append_samples(4, [{"step_was": 44}])
    assert [(line["step"], line["reward/mean"]) for line in run_dir.metrics()] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 9.0),
    ]
    assert run_dir.sample_steps() == [1, 2, 3, 4]
    assert [sample["step_was"] for sample in run_dir.samples(4)] == [44]


def test_rewinding_in_place_keeps_transcripts_of_rows_that_are_trained_again(run_dir):
    for step in (3, 4, 5):
        run_dir.append_samples(step, [{"group_id": step}])
        run_dir.append_samples(step, [{"group_id": -step, "purpose": "eval"}])
    run_dir.rewind(3, in_place=True)
    run_dir.append_samples(4, [{"group_id": 44}])
    found = {step: [sample["group_id"] for sample in run_dir.samples(step)] for step in run_dir.sample_steps()}
    assert found == {3: [3, -3], 4: [4, 44]}, "evaluations are made anew"


def test_a_torn_end_is_skipped_by_readers_and_cut_before_writing_on(run_dir):
    for step in (1, 2):
        run_dir.append_metrics(step, 5.0, {"reward/mean": 0.5})
        run_dir.append_samples(1, [{"text": f"sample {step}" * 50}])
    run_dir.write("summary", {"status": "stopped"})
    run_dir.close()
    with (run_dir.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"schema":"relax.metrics/1","step":3,"rew')
    samples = run_dir.samples_path(1)
    samples.write_bytes(samples.read_bytes()[:-3])
    again = RunDirectory.reopen(run_dir.path)
    assert again.read("summary") is None, "a run that continues has not ended"
    assert [line["step"] for line in again.metrics()] == [1, 2]
    assert len(list(again.samples(1))) == 1
    again.append_metrics(3, 6.0, {"reward/mean": 0.7})
    again.append_samples(1, [{"text": "after"}])
    assert [line["step"] for line in again.metrics()] == [1, 2, 3]
    assert [sample["text"][:8] for sample in again.samples(1)] == ["sample 1", "after"]
    again.close()


WRITER = """
import sys
from datetime import datetime
from pathlib import Path
from random import Random
from relax_core.observe.run_directory import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), "x", datetime(2026, 11, 20), Random(1))
run.write_config("steps = 4\\n")
"""


def test_a_writer_killed_at_work_leaves_a_readable_run(tmp_path):
    script = WRITER + (
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    run.append_samples(step, [{'text': 'x' * 3000}] * 3)\n"
        "    run.append_metrics(step, 1.0, {f'a/{i}': 1.0 for i in range(200)})\n"
        "    run.write('status', {'step': step, 'roles': ['y' * 100] * 100})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 40:
        pass
    process.send_signal(signal.SIGKILL)
    told = [40, *(int(line) for line in process.stdout.read().split())]
    process.wait(timeout=600)
    status = RunDirectory.open(tmp_path / "run").read("status")
    run = RunDirectory.reopen(tmp_path / "run")
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= told[-1]
    assert all(len(list(run.samples(step))) == 3 for step in steps)
    assert abs(status["step"] - len(steps)) <= 1
    run.close()


def test_a_run_that_is_written_by_another_process_is_refused(tmp_path):
    script = WRITER + "print('ready', flush=True); sys.stdin.read()\n"
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(ConfigError, match=f"which process {process.pid} writes"):
            RunDirectory.reopen(tmp_path / "run")
        with pytest.raises(ConfigError, match=f"which process {process.pid} writes; wait for it"):
            create(tmp_path, tmp_path / "run")
        with pytest.raises(ConfigError, match=f"which process {process.pid} writes; wait for it"):
            prepare_resume(tmp_path / "run", ())
    finally:
        process.kill()
        process.wait(timeout=600)
    RunDirectory.reopen(tmp_path / "run").close()


def test_a_secret_is_in_no_file(tmp_path):
    secret = 'p"ss\\wörd-9271'
    run = create(tmp_path, redactor=Redactor([secret]))
    run.write_config(f"url = '{secret}'\n")
    run.write("provenance", {"arguments": [f"--token={secret}"], "nested": {"api_key": "short", secret: 1}})
    run.append_metrics(1, 1.0, {f"a/{secret}": 1.0})
    run.append_samples(1, [{"response": f"the secret is {secret}!"}])
    (sample,) = run.samples(1)
    assert sample["response"] == "the secret is [redacted]!"
    assert run.read("provenance")["nested"]["api_key"] == "[redacted]"
    run.close()
    forms = [secret, json.dumps(secret)[1:-1], "wörd-9271", "w\\u00f6rd-9271"]
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        assert not [form for form in forms if form.encode() in data], path


def test_commands_are_taken_once_in_their_order_and_invalid_files_are_ignored(run_dir, caplog):
    sent = [
        Pause(),
        Profile(3),
        ScaleRequest("key", target=2),
        LogMetrics({"user/a": 1.5}, 2),
        ClearMetrics(),
        Autoscale(False),
    ]
    for command in sent:
        run_dir.send(command)
    invalid = (
        '{"command": "log-metrics", "values": {"reward/mean": 1}}', '{"command": "log-metrics", "values": 3}',
        "[1]", '{"command": "jump"}', '{"command": "profile", "steps": "3"}', '{"command": "scale", "size": 3}',
    )  # fmt: skip
    for number, text in enumerate(invalid):
        (run_dir.path / ".commands" / f"9-{number}.json").write_text(text)
    assert run_dir.take_commands() == sent and run_dir.take_commands() == []
    assert [record.message.split(": ")[1] for record in caplog.records] == [f"9-{number}.json" for number in range(6)]
