# SPDX-License-Identifier: Apache-2.0
"""Three models' estimates beside what torch's allocator gave out in an update, in every format and sharing of weights."""

from dataclasses import replace

import pytest
from relax_plugin_torch.trainer import TorchTrainer

from relax_core.api import Workload
from relax_core.testing.trainer_ranks import RankedTrainer
from tests.benchmarks.trainer import Size, build, built, spec_of, step_of
from tests.benchmarks.watched import Watched

pytestmark = pytest.mark.one_process("ranks")  # whose fork server loads torch and Megatron once
SIZES = {
    "0.1M": Size(64, 192, 2, 2, 500, 4, 4, 24, 40, 512),
    "0.4M": Size(96, 256, 3, 4, 1000, 4, 4, 32, 64, 512),
    "0.9M": Size(128, 384, 2, 4, 4000, 2, 4, 64, 96, 640),
}
LORA = {"rank": 8, "alpha": 16.0}
CASES = [
    ("0.1M", {"share_prefixes": True}, {}), ("0.1M", {"activation_checkpointing": True}, {}),
    ("0.4M", {}, {"dtype": "bfloat16", "lora": LORA}), ("0.9M", {"logits_mb": 1}, {}),
    *(
        pytest.param(*case, marks=pytest.mark.faults)
        for case in (("0.1M", {}, {}), ("0.9M", {}, {}), ("0.9M", {}, {"dtype": "bfloat16"}))
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("model") for name in SIZES}
    for name, folder in made.items():
        build(SIZES[name], folder)
    return made


def work_of(size):
    return Workload(size.prompts, size.group, size.prompt, size.new)


def spec_with(size, folder, model, **changes):
    spec = spec_of(size, str(folder))
    return replace(spec, model={**spec.model, **model}, **changes)


def peak_of_second_step(trainer, size):
    """Return the peak of a step that begins with an optimizer's state; the step before is not watched, which takes time."""
    trainer.watches = False
    step_of(trainer, size, 0)
    trainer.watches = True
    step_of(trainer, size, 1)
    return trainer.peak_bytes()


@pytest.mark.parametrize(("name", "options", "model"), CASES)
def test_the_estimate_is_within_a_tenth_of_the_peak(folders, name, options, model):
    size = SIZES[name]
    trainer = Watched(Watched.options_model()(**{"share_prefixes": False, **options}))
    trainer.build = built
    spec = spec_with(size, folders[name], model)
    told = trainer.estimate(spec, work_of(size)).tensors("train")
    trainer.start(spec)
    peak = peak_of_second_step(trainer, size)
    trainer.stop()
    assert told == pytest.approx(peak, rel=0.1)


def test_a_critic_has_no_logits_and_publishes_nothing(folders):
    size, spec = SIZES["0.9M"], spec_with(SIZES["0.9M"], folders["0.9M"], {}, role="critic")
    trainer = Watched(Watched.options_model()(share_prefixes=False))
    trainer.build = built
    told = trainer.estimate(spec, work_of(size))
    trainer.start(spec)
    peak = peak_of_second_step(trainer, size)
    trainer.stop()
    assert told.phases.keys() == {"train", "checkpoint"} and "logits" not in told.phases["train"]
    assert told.tensors("train") == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.faults), "fsdp"])
def test_so_it_is_on_each_of_two_ranks(folders, sharding):
    name, options = "0.1M", {"share_prefixes": False, "sharding": sharding}
    size = SIZES[name]
    ranks = RankedTrainer(Watched, options, 2)
    ranks.start(spec_with(size, folders[name], {}))
    step_of(ranks, size, 0, 2)
    step_of(ranks, size, 1, 2)
    peaks = ranks._all("peak_bytes")
    ranks.stop()
    alone = TorchTrainer(TorchTrainer.options_model()(**options))
    alone.build = built
    specs = [spec_with(size, folders[name], {}, rank=rank, world_size=2) for rank in range(2)]
    told = [alone.estimate(spec, work_of(size)).tensors("train") for spec in specs]
    assert told == pytest.approx(peaks, rel=0.1)
