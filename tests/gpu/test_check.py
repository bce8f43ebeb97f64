# SPDX-License-Identifier: Apache-2.0
"""The GPU check lists what it would install and run, finds the marked tests, and reports what its parts wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import NAMES
from tests.gpu.__main__ import check
from tests.gpu.parts import ROOT, MarkedTest, Part, marked_tests

FACTS = {
    "machine": {
        "gpus": [{"name": "NVIDIA H200", "memory_gib": 139.8}], "driver": "580.1", "cuda": "13.0", "torch": "2.13.0",
        "python": "3.11.9", "cores": 16, "system": "Linux",
    },
    "packages": {"torch": "2.13.0"},
}  # fmt: skip


def test_a_dry_run_lists_what_it_would_install_and_run() -> None:
    command = ["scripts/gpu-check", "--dry-run", "--engine", "vllm", "--wheels", "docs"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"from the wheels in {ROOT}/docs alone", "install: scripts/environment .venv"]
    assert "install: scripts/engine vllm venvs/vllm" in lines
    versions = [line.strip().partition("==")[0] for line in lines if line.startswith("  ")]
    assert {"torch", "transformers", "megatron-core", "nvidia-nccl-cu13"} <= {*versions}
    runs = [line for line in lines if line.startswith("run ")]
    named = [word for line in runs for word in line.split() if word.startswith(("plugins/", "tests/"))]
    assert named and all((ROOT / path).exists() for path in named)
    benchmarks = {line.split()[5] for line in runs if line.startswith("run bench-")}
    assert benchmarks and benchmarks <= {*NAMES}
    marked = [line for line in lines if line.startswith("marked gpu: ")]
    assert len(marked) == len(marked_tests()) > 0


def test_the_script_refuses_an_option_without_its_value() -> None:
    done = subprocess.run(
        ["scripts/gpu-check", "--dry-run", "--wheels"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "--wheels needs a folder" in done.stderr, done.stdout) == (1, True, "")


def test_marks_of_tests_classes_and_files_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_some.py").write_text(
        "import pytest\nGPU = pytest.mark.gpu\n\n@pytest.mark.gpu\ndef test_one(): ...\n\ndef test_of_no_gpu(): ...\n\n"
        "class TestMany:\n    @pytest.mark.gpu(4)\n    def test_four(self): ...\n\n"
        "@pytest.mark.gpu(2)\nclass TestTwo:\n    async def test_two(self): ...\n    def helper(self): ...\n"
    )
    (folder / "test_whole.py").write_text(
        "import pytest\npytestmark = [pytest.mark.process, pytest.mark.gpu]\n\ndef test_a(): ...\n\n"
        "@pytest.mark.gpu(8)\ndef test_b(): ...\n"
    )
    found = [(test.file, test.name, test.gpus) for test in marked_tests(tmp_path)]
    some, whole = "tests/test_some.py", "tests/test_whole.py"
    assert found == [
        (some, "test_one", 1), (some, "test_four", 4), (some, "test_two", 2), (whole, "test_a", 1), (whole, "test_b", 8),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A check of parts that pass, fail, write rows, write nothing, and hang."""
    folder = tmp_path_factory.mktemp("check")
    file = folder / "test_parts.py"
    file.write_text(
        "import pytest\n\ndef test_passes(): ...\n\ndef test_fails():\n    assert 1 == 2, 'one is not two'\n\n"
        "def test_skips():\n    pytest.skip('no flash-attn')\n"
    )
    rows = {"rows": [{"model": "0.5B", "step s": 2.0, "step / floor": 1.25}]}
    hangs = "import time\nprint('began', flush=True)\ntime.sleep(600)"
    writes = f"import pathlib; pathlib.Path({str(folder / 'bench.json')!r}).write_text({json.dumps(rows)!r})"
    pytests = (
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--junitxml",
        str(folder / "some.xml"),
        "-c",
        str(folder / "none.ini"),
    )
    (folder / "none.ini").write_text("[pytest]\n")
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    chosen = [
        Part("some", "tests", (*pytests, str(file)), 300, results="some.xml", environment=plain),
        Part("bench", "benchmark", ("-c", writes), 300, results="bench.json"),
        Part("silent", "tests", ("-c", ""), 300, results="silent.xml"),
        Part("hangs", "benchmark", ("-c", hangs), 0.5, results="hangs.json"),
    ]
    yield check(folder, chosen, FACTS), folder


def test_each_part_is_reported_with_its_results(checked: tuple[int, Path]) -> None:
    code, folder = checked
    report = json.loads((folder / "report.json").read_text())
    some, bench, silent, hangs = report["parts"]
    assert code == 1
    assert [part["status"] for part in report["parts"]] == ["failed", "passed", "no results", "timed out"]
    assert some["passed"] == 1 and [each["why"] for each in some["skipped"]] == ["no flash-attn"]
    (failure,) = some["failures"]
    assert failure["test"].endswith("test_fails") and "one is not two" in failure["said"]
    assert bench["ratios"] == [{"of": "0.5B", "ratio": "step / floor", "value": 1.25}]
    assert (folder / some["log"]).read_text().count("test_parts.py") and silent["failures"] == hangs["rows"] == []


def test_the_page_names_the_machine_and_everything_that_did_not_pass(checked: tuple[int, Path]) -> None:
    page = (checked[1] / "report.md").read_text()
    assert "NVIDIA H200 (139.8 GiB); driver 580.1, CUDA 13.0, torch 2.13.0" in page
    assert "| some | failed | 1 | 1 | 1 |" in page and "| bench | 0.5B | step / floor | 1.25 |" in page
    assert "test_fails: AssertionError: one is not two" in page and "test_skips: no flash-attn" in page
    for test in marked_tests():
        assert (f"{test.name} needs {test.gpus}" in page) == (test.gpus > 1)


def test_tests_for_more_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.gpu.__main__.marked_tests",
        lambda: (MarkedTest("a.py", "test_two", 2), MarkedTest("a.py", "test_one", 1)),
    )
    assert check(tmp_path, [Part("bench", "benchmark", ("-c", ""), 300, results="x.json")], FACTS) == 1
    assert "- a.py::test_two needs 2" in (page := (tmp_path / "report.md").read_text()) and "test_one" not in page


def test_an_engine_without_an_interpreter_and_an_unknown_part_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gpu.__main__ import main

    for arguments, said in (
        (["--engine", "vllm"], "write ENGINE=PYTHON"),
        (["--only", "tests"], "the parts are marked, torch"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert said in capsys.readouterr().err


def test_the_device_benchmark_holds_each_piece_of_work_against_a_floor() -> None:
    from tests.benchmarks.device import Device, measure
    from tests.benchmarks.trainer import Size

    rows = measure("tiny", Size(32, 64, 2, 2, 128, 2, 2, 8, 8), Device("cpu"), 1)
    assert [row["what"] for row in rows] == ["training step", "publish", "engine's update", "decoding"]
    for row in rows:
        assert row["floor s"] > 0 and row["seconds / floor"] == row["seconds"] / row["floor s"]
    assert rows[0]["GFLOP"] > 0 and rows[1]["MB"] == rows[2]["MB"] > 0 and rows[3]["tokens/s"] > 0
