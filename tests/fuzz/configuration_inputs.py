# SPDX-License-Identifier: Apache-2.0
"""Configurations, overrides and model folders: what `relax plan` reads."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from relax_plugin_workbench.data_survey import data_files, survey, survey_overlap
from relax_plugin_workbench.memory import memory

from relax_core.api.checks import PreflightFacts
from relax_core.api.weights import Version
from relax_core.config.compose import compose
from relax_core.config.run_config import literal
from relax_core.control.planner import plan
from relax_core.control.preflight import free_memory
from relax_core.registry.catalogue import Catalogue
from relax_core.tensor_files.transport import Disk
from tests.fuzz.mutations import SCALARS, json_bytes, mutate_bytes, mutate_tree

Files = dict[str, bytes]
"""Content by path below the input's folder."""
SECRET = "hunter2-never-shown"
"""Stands where configurations have credentials; no error may repeat it."""


@cache
def model_files() -> Files:
    """A model folder that is whole as far as a configuration's checks look."""
    from relax_contrib.recipes.quickstart.model import save_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        tensors = {"model.embed_tokens.weight": np.zeros((64, 8), np.float32)}
        Disk().send(
            Version("actor", 0, 0), "full", "", ((n, a, "F32") for n, a in tensors.items()), f"{folder}/weights"
        )
        (weights,) = Path(folder, "weights").iterdir()
        config: dict[str, Any] = {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
            "intermediate_size": 8, "max_position_embeddings": 1024, "eos_token_id": 2, "tie_word_embeddings": True,
        }  # fmt: skip
        return {
            "model/config.json": json.dumps(config).encode(),
            "model/generation_config.json": b'{"eos_token_id": [2]}',
            "model/tokenizer.json": Path(folder, "tokenizer.json").read_bytes(),
            "model/tokenizer_config.json": Path(folder, "tokenizer_config.json").read_bytes(),
            "model/model.safetensors": weights.read_bytes(),
        }


TASKS = b'{"prompt": "s21=", "answer": "12"}\n{"prompt": [{"role": "user", "content": "s43="}], "answer": "34"}\n'
EXTRA: dict[str, Any] = {
    "notify": {"urls": [SECRET]},
    "run": {"env": {"API_TOKEN": SECRET, "MODE": "x"}, "tags": ["a"], "runner": "local"},
    "sinks": [{"name": "tensorboard"}],
    "filters": [{"name": "zero-variance"}],
    "rewards": [{"name": "exact", "weight": 2.0, "timeout_s": 5.0}],
    "stages": [{"name": "warm", "algorithm": "sft"}, {"algorithm": {"name": "grpo", "clip_low": 0.1}}],
    "environments": [{"name": "single-turn"}],
    "engines": [{"engine": {"name": "transformers"}, "count": 1}],
    "media": ["image"],
    "checkpoint": {"every": 10, "keep": 2},
    "eval": {"every": 5, "sets": [{"name": "held-out", "path": "train.jsonl"}], "samples": 2},
    "placement": {"mode": "async", "actor": {"ranks": 1}, "rollout": {"engines": 1}},
    "weights": {"name": "disk", "location": "weights"},
    "bus": {"name": "in-process"},
}


@cache
def recipes() -> tuple[dict[str, Any], ...]:
    found = []
    for name in ("quickstart", "digits", "guess_number", "experts", "colours"):
        text = (resources.files("relax_contrib.recipes") / name / "recipe.toml").read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        tree["run"] = {**tree.get("run", {}), "runner": "local"}
        tree["data"] = {**tree.get("data", {}), "train": "train.jsonl"}
        tree.pop("teachers", None)
        tree["eval"] = {"every": 0}
        found.append(tree)
    return tuple(found)


def a_configuration(random: Random) -> dict[str, Any]:
    tree = json.loads(json.dumps(random.choice(recipes())))
    for key in random.sample(sorted(EXTRA), random.choice((0, 1, 1, 2, 3))):
        tree[key] = EXTRA[key]
    return tree


def toml_bytes(tree: Mapping[str, Any]) -> bytes:
    return "\n".join(f"{literal(key)} = {_literal(value)}" for key, value in tree.items()).encode(
        "utf-8", errors="surrogatepass"
    )


def _literal(value: Any) -> str:
    """A value as TOML; None, which TOML lacks, as a word that is none."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)} = {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return literal(value)


def configuration_input(random: Random) -> Files:
    tree = a_configuration(random)
    mutated = mutate_tree(tree, random)
    body = toml_bytes(mutated if isinstance(mutated, dict) else {"steps": mutated})
    if random.random() < 0.02:
        deep = random.choice((400, 3000))
        body += b"\ndeep = " + b"[" * deep + b"]" * deep
    if random.random() < 0.3:
        body = mutate_bytes(body, random)
    return {"my.toml": body, "train.jsonl": TASKS, **model_files()}


KEYS = (
    "steps", "seed", "max_staleness", "algorithm", "algorithm.name", "algorithm.clip_low", "rollout.group_size", "rewards",
    "rewards.0.name", "rewards.0.weight", "rewards.1", "model.path", "model.lora", "data.train", "data.columns", "placement",
    "placement.mode", "placement.actor.ranks", "eval.sets.0.path", "run.env.TOKEN", "notify.urls", "notify.urls.0",
    "stages.0.algorithm", "engines.0.engine", "sinks.0", "plugins", "checkpoint.every", "optimizer.lr", "optimizer.betas.1",
    "bus.name", "weights", "a.b.c", "", ".", "rollout.stop", "environments.0.algorithm.name", "media", "trainer.python",
)  # fmt: skip


def override_input(random: Random) -> Files:
    words = []
    for _ in range(random.choice((1, 1, 2, 4))):
        key, value = random.choice(KEYS), random.choice(SCALARS)
        text = value if isinstance(value, str) else _literal(value)
        if random.random() < 0.3:
            text = _literal(mutate_tree(random.choice(list(EXTRA.values())), random))
        word = f"{key}={text}".encode("utf-8", errors="surrogatepass")
        words.append(mutate_bytes(word, random) if random.random() < 0.3 else word)
    return {"overrides": b"\xff\xff".join(words), "my.toml": toml_bytes(a_configuration(random)), "train.jsonl": TASKS,
            **model_files()}  # fmt: skip


@cache
def installed() -> Catalogue:
    return Catalogue.load()


def feed_configuration(folder: Path) -> None:
    """Compose, check, plan and compare with the memory, as `relax plan` does."""
    words = folder / "overrides"
    raw = words.read_bytes().split(b"\xff\xff") if words.exists() else []
    overrides = [word.decode("utf-8", errors="surrogateescape") for word in raw]
    composed = compose([folder / "my.toml"], overrides, installed())
    for config in [stage.config for stage in composed.stages] or [composed.config]:
        list(memory(PreflightFacts(config.dump(), plan(config, installed()), free_memory())))


def sound_model() -> Files:
    """Return a configuration with its tasks and the model folder that it names."""
    config = {**recipes()[0], "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 8}}
    return {"my.toml": toml_bytes(config), "train.jsonl": TASKS, **model_files()}


def model_input(random: Random) -> Files:
    files = dict(model_files())
    name = random.choice([name for name in files if name != "model/tokenizer.json" or random.random() < 0.2])
    files[name] = _spoiled(name, files[name], random)
    if random.random() < 0.2:
        template = random.choice((
            "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ 'x' * 10 ** 12 }}", "{{ messages.__class__ }}", "{% if",
            "{{ ''.__class__.__mro__ }}", "{{ 9 ** 9 ** 9 }}", "{{ raise_exception('a\\nb') }}", "{{ messages[9].role }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ [1] * 10 ** 10 }}", "{{ strftime_now('%') }}",
        ))  # fmt: skip
        files["model/chat_template.jinja"] = template.encode()
    return {**sound_model(), **files}


def _spoiled(name: str, body: bytes, random: Random) -> bytes:
    try:
        return json_bytes(json.loads(body), random) if name.endswith(".json") else mutate_bytes(body, random)
    except (ValueError, RecursionError):  # it was spoiled before
        return mutate_bytes(body, random)


def feed_model(folder: Path) -> None:
    """Check the configuration that names the folder, and render the tasks with its template as `relax data check` does."""
    feed_configuration(folder)
    for found in data_files(folder / "train.jsonl", folder / "model"):
        survey_overlap(found, survey(found), None)
