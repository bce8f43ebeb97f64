# SPDX-License-Identifier: Apache-2.0
"""The files of `relax_contrib.deploy`: manifests fit the schemas of Kubernetes and KubeRay and agree with the code."""

from __future__ import annotations

import copy
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from jsonschema import Draft202012Validator

from relax_contrib.deploy.__main__ import HERE, files, main
from relax_core.cli.main import app
from relax_core.config.compose import compose
from relax_core.config.run_config import RunConfig
from relax_core.runners.ray.environment import SETTINGS

ROOT = Path(__file__).parents[3]
SCHEMAS = [json.loads((Path(__file__).parent / name).read_text()) for name in ("kubernetes.json", "kuberay.json")]
DEFINITIONS = {name: schema for document in SCHEMAS for name, schema in document["$defs"].items()}
MANIFESTS = sorted(HERE.glob("*.yaml"))
CLUSTERS = [path for path in MANIFESTS if path.name.startswith("ray-")]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def faults(document: dict[str, Any]) -> list[str]:
    """Return what a document has that the schema of its kind refuses."""
    schema = {"$ref": f"#/$defs/{document['kind']}", "$defs": DEFINITIONS}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document)]


def cluster_spec(path: Path) -> dict[str, Any]:
    spec: dict[str, Any] = documents(path)[0]["spec"]
    return spec.get("rayClusterSpec", spec)


def pods(path: Path) -> list[dict[str, Any]]:
    """Return the pod specifications of a cluster, the head first."""
    spec = cluster_spec(path)
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", ()))]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_fits_the_schema_of_its_kind(path: Path) -> None:
    for document in documents(path):
        assert faults(document) == []


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 8, "8 is not of type 'string'"),
        (
            ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "container"),
            [],
            "'container' was unexpected",
        ),
        (("spec", "rayClusterSpec", "workers"), [], "'workers' was unexpected"),
        (("spec", "backofLimit"), 3, "'backofLimit' was unexpected"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens", "'tokens' is not one of"),
    ],
)
def test_the_schema_refuses_a_wrong_field(keys: tuple[str, ...], value: object, said: str) -> None:
    broken = copy.deepcopy(documents(HERE / "ray-job-cuda.yaml")[0])
    inner = broken
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    assert any(said in fault for fault in faults(broken)), faults(broken)


def test_the_cluster_of_a_job_is_the_cluster_of_the_same_variant() -> None:
    for variant in ("", "-cuda"):
        job, cluster = HERE / f"ray-job{variant}.yaml", HERE / f"ray-cluster{variant}.yaml"
        assert cluster_spec(job) == cluster_spec(cluster)


def test_the_variants_differ_only_in_the_image_and_in_pods_with_gpus() -> None:
    plain, cuda = (cluster_spec(HERE / f"ray-job{variant}.yaml") for variant in ("", "-cuda"))
    (workers,) = cuda.pop("workerGroupSpecs")
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) > 0
    cuda["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = "registry.example/relax:cpu"
    assert plain == cuda


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_has_the_locked_ray_a_token_and_shared_storage(path: Path) -> None:
    spec = cluster_spec(path)
    assert f"ray=={spec['rayVersion']}" in (ROOT / "constraints/cpu.txt").read_text().splitlines()
    assert spec["authOptions"] == {"mode": "token"}
    claims, policy = documents(HERE / "kubernetes.yaml")
    assert claims["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", ())):
        labels = group["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        (container,) = group["template"]["spec"]["containers"]
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claims["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_pod_asks_for_a_checkpoint_of_the_jobs_run_and_has_time_for_it(path: Path) -> None:
    grace_s = cluster_config().checkpoint.grace_s
    job = documents(HERE / path.name.replace("cluster", "job"))[0]["spec"]["entrypoint"]
    run = job.split("--run-dir ")[1].split()[0]
    assert run.startswith("/shared/")
    for number, pod in enumerate(pods(path)):
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["relax", "checkpoint" if number else "stop", run]
        wait_s = float(command[command.index("--wait-s") + 1])
        assert grace_s < wait_s < pod["terminationGracePeriodSeconds"]
        check_command(command)


BASE = {
    "model": {"path": "models/my-model"},
    "data": {"train": "data/train.jsonl"},
    "algorithm": "grpo",
    "engine": "transformers",
    "trainer": "torch",
    "rewards": ["exact"],
}


@cache
def cluster_config() -> RunConfig:
    return compose([HERE / "cluster.toml"], base=BASE, on_disk=False).config


def check_command(words: list[str]) -> None:
    """Parse a `relax` command line without running it; raise click's UsageError if it is wrong."""
    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], list(words[2:]))


def test_the_command_lines_are_commands_of_relax() -> None:
    for path in CLUSTERS:
        (line,) = re.findall(r"relax train /[^\n]*", path.read_text())
        check_command(shlex.split(line))
    (line,) = re.findall(r"^relax train .* &$", (HERE / "slurm.sh").read_text(), re.MULTILINE)
    check_command(shlex.split(line.removesuffix(" &")))


def test_the_configuration_for_clusters_is_valid_and_runs_on_ray() -> None:
    config = cluster_config()
    assert config.run.runner == "ray" and config.weights.name == "disk"


def test_image_and_slurm_script_give_rays_processes_the_settings_of_the_runner() -> None:
    for name in ("Dockerfile", "slurm.sh"):
        pairs = re.findall(r"(?:ENV|export| {4}) ?(RAY_\w+)=(\d+)", (HERE / name).read_text())
        assert dict(pairs) == SETTINGS, name


def test_the_image_copies_and_installs_what_the_checkout_has() -> None:
    text = (HERE / "Dockerfile").read_text()
    assert (ROOT / re.findall(r" -c (constraints/\S+)", text)[0]).is_file()
    extras = re.findall(r'"\.\[(\S+)\]"', text)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    for engine in ("vllm", "sglang"):
        assert re.search(
            rf"^{engine} = ", (ROOT / f"plugins/relax-plugin-{engine}/pyproject.toml").read_text(), re.MULTILINE
        )


def test_all_files_are_copied_and_none_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "deploy"
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / path.name) for path in files()]
    assert {path.name for path in folder.iterdir()} == {path.name for path in files()} >= {"slurm.sh", "Dockerfile"}
    assert (folder / "slurm.sh").stat().st_mode & 0o100
    (folder / "slurm.sh").write_text("mine")
    for path in files():
        if path.name != "slurm.sh":
            (folder / path.name).unlink()
    assert main([str(folder)]) == 2
    assert "already has slurm.sh; name another folder" in capsys.readouterr().err
    assert (folder / "slurm.sh").read_text() == "mine" and len(list(folder.iterdir())) == 1
    for words in ([], ["--help"], ["a", "b"]):
        assert main(words) == 2 and "usage: " in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2 and "name a folder that you can write to" in capsys.readouterr().err
