# SPDX-License-Identifier: Apache-2.0
"""What is this trainer's own: scores and gradients against transformers itself, bad folders, bf16, published weights."""

import json
import shutil

import numpy as np
import pytest
import torch

from relax_core import learn
from relax_core.api import Algorithm, ConfigError, Loss, Ragged, RowBatch, RowId, Term, Version
from relax_core.api.algorithm import ENTROPY, LOG_PROBS, VALUES_OUTPUT
from relax_core.api.errors import InfrastructureError, PluginError
from relax_core.tensor_files.transport import Disk
from relax_core.testing.trainer import InMemory, Reinforce, forward, make_rows, tiny_model
from tests.trainers import TRANSPORT, accumulate, gradients, train


class Ratio(Algorithm):
    """A clipped-ratio loss that reads old_log_probs, entropy and per-row means."""

    def outputs(self):
        return frozenset({LOG_PROBS, ENTROPY})

    def loss(self, batch, policy):
        ratio = (policy.log_probs - batch.column("old_log_probs")).exp()
        surrogate = batch.sequence_mean(ratio * batch.advantages)
        return Loss(
            {
                "policy": Term(surrogate, -1.0, "rows", per="row"),
                "entropy": Term(policy.output("entropy"), -0.1, "rows"),
            }
        )


class Values(Ratio):
    def outputs(self):
        return frozenset({VALUES_OUTPUT})


@pytest.fixture
def start(start):
    """Start trainers of `Ratio`."""
    return lambda path, **how: start(path, **{"algorithm": Ratio, **how})


def slopes_of(trainer, rows):
    """The gradient of the first update."""
    trainer.begin_step(Version("actor", 0, 0))
    accumulate(trainer, rows)
    return gradients(trainer)


def one_by_one(folder, rows, temperature):
    """Gradient of the same loss through transformers alone: one row at a time, no padding, no packing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = []
    for tokens, mask, advantages in zip(
        *(rows.columns[n].rows() for n in ("tokens", "loss_mask", "advantages")), strict=True
    ):
        ids = torch.tensor(tokens, dtype=torch.long)
        logits = model(ids[None]).logits[0, :-1] / temperature
        everything = torch.log_softmax(logits, -1)
        log_probs = everything.gather(-1, ids[1:, None])[:, 0]
        entropy = -(everything.exp() * everything).sum(-1)
        keep = torch.tensor(mask[1:]).bool()
        ratio = (log_probs - log_probs.detach()).exp()
        surrogate = (ratio * torch.tensor(advantages[1:]))[keep].mean()
        ((-surrogate - 0.1 * entropy[keep].sum()) / len(rows)).backward()
        scores.append(torch.cat([torch.zeros(1), log_probs.detach() * keep]).numpy())
    return scores, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_and_gradients_equal_those_of_single_rows(folder, start, temperature):
    rows = make_rows()
    trainer = start(folder, temperature=temperature)
    scores, want = one_by_one(folder, rows, temperature)
    assert np.allclose(forward(trainer, rows, 0).values, np.concatenate(scores), atol=1e-5)
    have = slopes_of(trainer, rows)
    for name, gradient in want.items():
        assert torch.allclose(have[name], gradient, rtol=1e-3, atol=1e-6), name


def test_a_model_without_a_separate_head_is_scored(tmp_path, start):
    from transformers import Cohere2Config, Cohere2ForCausalLM

    torch.manual_seed(0)
    config = Cohere2Config(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        max_position_embeddings=128, logit_scale=0.25, initializer_range=0.3,
    )  # fmt: skip
    Cohere2ForCausalLM(config).save_pretrained(tmp_path / "model")
    rows, trainer = make_rows(), start(tmp_path / "model")
    scores, want = one_by_one(tmp_path / "model", rows, 1.0)
    assert not trainer._policy._apart
    assert np.allclose(forward(trainer, rows, 0).values, np.concatenate(scores), atol=1e-5)
    for name, gradient in slopes_of(trainer, rows).items():
        assert torch.allclose(gradient, want[name], rtol=1e-3, atol=1e-6), name


def test_forward_fills_entropy_too(folder, start):
    trainer, rows = start(folder, role="reference"), make_rows()
    entropy = forward(trainer, rows, 0, ("entropy", "log_probs")).values
    mask = rows.columns["loss_mask"].values == 1
    assert (entropy[mask] > 0).all() and not entropy[~mask].any()
    with pytest.raises(ValueError, match="forward: got columns"):
        forward(trainer, rows, 0, ("values",))


def test_the_entropy_of_trained_tokens_is_measured_without_an_entropy_bonus(folder, start):
    rows = make_rows()
    want = forward(start(folder), rows, 0, ("entropy", "log_probs")).values[rows.columns["loss_mask"].values == 1]
    total, number = train(start(folder, algorithm=Reinforce), 0, rows).metrics["policy/entropy"]
    assert (total, number) == (pytest.approx(want.sum(), rel=1e-4), len(want))


def test_a_role_that_only_computes_never_updates(folder, start):
    trainer = start(folder, role="actor_fwd")
    trainer.begin_step(Version("actor", 0, 0))
    with pytest.raises(ValueError, match="actor_fwd"):
        trainer.begin_update({})


def test_the_difference_from_the_engine_is_measured_before_the_weights_move(folder, start):
    rows, trainer = make_rows(), start(folder, max_staleness=1)
    exact = forward(trainer, rows, 0).values
    versions = rows.columns["weight_versions"].values
    trainer.begin_step(Version("actor", 0, 0))
    results = []
    for _ in range(2):
        off = Ragged((exact + 0.25).astype(np.float32), rows.columns["tokens"].lengths)
        trained = rows.with_columns({"rollout_log_probs": off, "old_log_probs": Ragged(exact, off.lengths)})
        accumulate(trainer, trained)
        results.append(trainer.finish_update(learn.count(rows)).metrics)
    total, number = results[0]["train/rollout_log_prob_diff_lag0"]
    assert (total / number, number) == (pytest.approx(0.25, abs=1e-5), (versions == 0).sum())
    assert results[0]["train/rollout_log_prob_diff_max"] == (pytest.approx(0.25, abs=1e-5), 1.0)
    assert not any("rollout" in name for name in results[1])


def test_a_second_update_of_a_step_needs_the_starting_policy(folder, start):
    trainer, rows = start(folder), make_rows()
    train(trainer, 0, rows)
    with pytest.raises(PluginError, match="algorithm .*old_log_probs"):
        accumulate(trainer, rows)


def test_rows_of_unknown_lag_are_refused(folder, start):
    trainer, rows = start(folder), make_rows()
    del rows.columns["weight_versions"]
    with pytest.raises(ValueError, match="weight_versions"):
        train(trainer, 0, rows)


def test_bf16_trains_float32_weights_and_publishes_their_bits(folder, start):
    transport = InMemory()
    trainer = start(folder, transport=transport, model={"dtype": "bfloat16"})
    rows = make_rows()
    train(trainer, 0, rows)
    manifest = trainer.publish(Version("actor", 0, 1), TRANSPORT, "")
    assert {info.dtype for info in manifest.tensors} == {"BF16"}
    for info, array in transport.receive(manifest):
        weight = trainer._model.state_dict()[info.name]
        assert weight.dtype == torch.float32
        assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), weight.to(torch.bfloat16).cpu())


def test_tied_weights_are_published_once(folder, start):
    manifest = start(folder).publish(Version("actor", 0, 0), TRANSPORT, "")
    names = [info.name for info in manifest.tensors]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_published_weights_are_taken_whole_or_refused(folder, start, tmp_path):
    transport, rows = InMemory(), make_rows()
    actor, follower = start(folder, transport=transport), start(folder, transport=transport, role="actor_fwd")
    train(actor, 0, rows)
    manifest = actor.publish(Version("actor", 0, 1), TRANSPORT, "")
    follower.load_published(manifest, TRANSPORT)
    assert np.array_equal(forward(follower, rows, 0).values, forward(actor, rows, 0).values)
    other = start(tiny_model(tmp_path / "other", vocab_size=32), transport=transport, role="actor_fwd")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight differ"):
        other.load_published(manifest, TRANSPORT)


def test_an_exported_folder_loads_with_its_tokenizer(folder, start, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    source = tmp_path / "source"
    shutil.copytree(folder, source)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(source)
    trainer = start(source)
    trainer.export(str(tmp_path / "export"))
    assert AutoTokenizer.from_pretrained(tmp_path / "export").encode("b") == [2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, weight in trainer._model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight.cpu()), name


def broken(folder, tmp_path, change):
    copy = tmp_path / "broken"
    shutil.copytree(folder, copy)
    change(copy)
    return copy


def rewrite_config(**changes):
    def change(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


@pytest.mark.parametrize(("change", "says"), [
    (lambda path: (path / "config.json").unlink(), "no config.json"),
    (lambda path: (path / "config.json").write_text("{"), "not readable JSON"),
    (lambda path: (path / "config.json").write_text("{}"), "no model_type"),
    (lambda path: (path / "model.safetensors").unlink(), "lacks model.safetensors"),
    (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 20), "transformers can't load it"),
    (rewrite_config(model_type="never-heard-of"), "transformers can't load it"),
    (rewrite_config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "the weights lack model.layers.2"),
    (rewrite_config(vocab_size=65), "embed_tokens.weight"),
])  # fmt: skip
def test_a_broken_model_folder_says_what_is_wrong(folder, tmp_path, start, change, says):
    path = broken(folder, tmp_path, change)
    with pytest.raises(ConfigError, match=says) as raised:
        start(path)
    assert raised.value.field == "model.path" and str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("changes", "field"), [
    ({"world_size": 2}, "rendezvous"),
    ({"role": "genrm"}, "trainer.name"),
    ({"temperature": 0.0}, "rollout.temperature"),
    ({"algorithm": Values}, "algorithm.name"),
    ({"model": {"dtype": "float8"}}, "model.dtype"),
])  # fmt: skip
def test_unsupported_options_are_refused_at_the_start(folder, start, changes, field):
    with pytest.raises(ConfigError) as raised:
        start(folder, **changes)
    assert raised.value.field == field


def test_random_state_continues(folder, start, tmp_path):
    import random

    trainer = start(folder)
    trainer.save(str(tmp_path / "checkpoint"))
    want = [random.random(), np.random.random(), torch.rand(1).item()]
    trainer.load(str(tmp_path / "checkpoint"))
    assert [random.random(), np.random.random(), torch.rand(1).item()] == want


@pytest.mark.parametrize(("tokens", "says"), [
    ([1, 64], "row \\(3, 0, 0, 0\\): got token 64"), ([1, -1], "got token -1"), ([1] * 129, "got 129 tokens"),
    ([], "got 0 tokens"),
])  # fmt: skip
def test_rows_that_the_model_cannot_read_are_named(folder, start, tokens, says):
    mask = [0] * len(tokens)
    rows = RowBatch((RowId(3, 0, 0, 0),), {
        "tokens": Ragged.of([np.array(tokens, np.int32)]), "loss_mask": Ragged.of([np.array(mask, np.uint8)]),
    })  # fmt: skip
    with pytest.raises(ValueError, match=says):
        forward(start(folder, role="reference"), rows, 0)


def test_a_follower_takes_deltas_on_what_it_has_and_nothing_else(folder, start, tmp_path):
    bf16 = {"dtype": "bfloat16"}
    actor = start(folder, transport=Disk(), model=bf16)
    follower, late = (start(folder, transport=Disk(), role="actor_fwd", model=bf16) for _ in range(2))
    follower.load_published(actor.publish(Version("actor", 0, 0), TRANSPORT, str(tmp_path)), TRANSPORT)
    rows = make_rows()
    train(actor, 0, rows)
    delta = actor.publish(Version("actor", 0, 1), TRANSPORT, str(tmp_path), "delta", "actor@0.0")
    assert delta.payload == "delta" and delta.sent
    with pytest.raises(ValueError, match=r"on top of actor@0\.0; this trainer has None"):
        late.load_published(delta, TRANSPORT)
    follower.load_published(delta, TRANSPORT)
    for name, weight in follower._model.state_dict().items():
        assert torch.equal(weight, actor._model.state_dict()[name].to(torch.bfloat16).float()), name


def test_a_version_that_breaks_off_leaves_a_follower_that_computes_nothing(folder, start):
    class Breaking(InMemory):
        live = True

        def receive(self, manifest, resident=None):
            yield from list(super().receive(manifest))[:3]

    transport, rows = Breaking(), make_rows()
    actor, follower = start(folder, transport=transport), start(folder, transport=transport, role="actor_fwd")
    manifest = actor.publish(Version("actor", 0, 0), TRANSPORT, "")
    with pytest.raises(ValueError, match="did not arrive"):
        follower.load_published(manifest, TRANSPORT)
    with pytest.raises(InfrastructureError, match="broke off"):
        forward(follower, rows, 0)
