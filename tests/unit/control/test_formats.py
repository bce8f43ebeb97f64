# SPDX-License-Identifier: Apache-2.0
"""Number formats of trainer and engine in a plan: all nine go, and what can't be is refused with the field that says it."""

import itertools
from types import SimpleNamespace

import pytest

from relax_core.api.engine import Capabilities
from relax_core.api.errors import ConfigError
from relax_core.api.weights import Version
from relax_core.control.planner import plan
from relax_core.engines.factories import engine_spec
from relax_core.roles.rank_group import trainer_spec
from tests.unit.control.conftest import configured, planned

FORMATS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(("own", "engines"), itertools.product(FORMATS, FORMATS))
def test_trainer_and_engine_get_their_own_formats(catalogue, monkeypatch, own, engines):
    monkeypatch.setattr("relax_core.api.model_folder.model_context", lambda path: 64)
    config = configured(catalogue, f"model.dtype={own}", f"rollout.dtype={engines}")
    made = plan(config, catalogue)
    assert engine_spec(config, Version("actor", 0, 0)).model["dtype"] == engines
    context = SimpleNamespace(config=config, plan=made, build=catalogue.build, run_dir="")
    monkeypatch.setattr("relax_core.roles.rank_group.placeholders", lambda path: {})
    spec = trainer_spec(context, "actor", 0, 1, "", None)
    assert (spec.model["dtype"], spec.publish_dtype) == (own, engines)
    assert trainer_spec(context, "reference", 0, 1, "", None).publish_dtype == ""
    told = [note for note in made.notes if "published in" in note]
    note = f"trainers compute in {own}, engines in {engines}: weights are published in {engines}"
    assert told == ([] if own == engines else [note])
    assert configured(catalogue, f"model.dtype={own}").engine_dtype == own


def test_an_unsupported_format_of_an_engine_is_refused_with_its_field(catalogue, monkeypatch):
    engine = catalogue.target("engine", "transformers")
    monkeypatch.setattr(engine, "capabilities", Capabilities(dtypes=("float32", "bfloat16"), score=True))
    with pytest.raises(ConfigError, match=r"rollout\.dtype: got float16.*transformers computes in float32, bfloat16"):
        planned(catalogue, "rollout.dtype=float16")
    with pytest.raises(ConfigError, match=r"model\.dtype: got float16"):
        planned(catalogue, "model.dtype=float16")


def test_an_unsupported_format_of_a_trainer_is_refused(catalogue, monkeypatch):
    monkeypatch.setattr(catalogue.target("trainer", "torch"), "dtypes", ("float32",))
    with pytest.raises(ConfigError, match=r"model\.dtype: got bfloat16.*torch computes in float32"):
        planned(catalogue, "model.dtype=bfloat16", "rollout.dtype=float32")


def test_a_role_that_recomputes_log_probs_elsewhere_is_never_given_rounded_weights(catalogue):
    apart = ("algorithm.correction=truncate", "placement=async", "batch.updates_per_step=2", "rollout.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"rollout\.dtype: got bfloat16.*actor-fwd"):
        planned(catalogue, *apart)
    planned(catalogue, *apart, "model.dtype=bfloat16")
    planned(catalogue, *apart, "placement=hybrid")
    planned(catalogue, *apart, "model.dtype=bfloat16", "rollout.dtype=float32")
    planned(catalogue, *apart, "model.lora.rank=4")


def test_a_float32_head_is_refused_by_what_cannot_compute_it(catalogue, monkeypatch):
    planned(catalogue, "model.dtype=bfloat16", "model.head_dtype=float32")
    monkeypatch.setattr(catalogue.target("engine", "transformers"), "capabilities", Capabilities(score=True))
    says = r"model\.head_dtype: got float32.*transformers computes logits in bfloat16: use sglang or vllm"
    with pytest.raises(ConfigError, match=says):
        planned(catalogue, "model.dtype=bfloat16", "model.head_dtype=float32")
    planned(catalogue, "model.dtype=bfloat16", "rollout.dtype=float32", "model.head_dtype=float32")
    planned(catalogue, "model.head_dtype=float32")
    monkeypatch.setattr(catalogue.target("trainer", "torch"), "float32_head", False)
    with pytest.raises(ConfigError, match=r"model\.head_dtype: got float32.*trainer torch computes logits in model"):
        planned(catalogue, "model.dtype=bfloat16", "rollout.dtype=float32", "model.head_dtype=float32")


def test_profiles_of_absent_ranks_or_of_a_trainer_that_cannot_record_them_are_refused(catalogue, monkeypatch):
    planned(catalogue, "profile.steps=[3, 6]")
    planned(catalogue, "profile.steps=[3]", "profile.ranks=[0, 1]", "placement.actor.ranks=2")
    with pytest.raises(
        ConfigError, match=r"profile\.ranks: got \[1, 2\]; name ranks from 0 to 0: placement.actor.ranks is 1"
    ):
        planned(catalogue, "profile.steps=[3]", "profile.ranks=[0, 1, 2]")
    monkeypatch.setattr(catalogue.target("trainer", "torch"), "profiles", False)
    with pytest.raises(ConfigError, match=r"profile\.steps: got \[3, 6\].*trainer torch can't record profiles"):
        planned(catalogue, "profile.steps=[3, 6]")
