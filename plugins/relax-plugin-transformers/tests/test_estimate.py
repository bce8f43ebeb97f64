# SPDX-License-Identifier: Apache-2.0
"""What an engine is said to need is what torch's allocator gave out while it generated, at whatever moment that was most."""

import pytest
from relax_plugin_transformers.engine import TransformersEngine
from relax_plugin_transformers.reservation import grown, rounded

from relax_core.api import EngineSpec, Workload
from tests.benchmarks.trainer import Size, build
from tests.benchmarks.watched_engine import requests_of, tensors

SIZES = {
    "0.2M": Size(64, 192, 2, 2, 1000, 4, 4, 24, 40),
    "1.5M": Size(128, 384, 5, 4, 4000, 4, 4, 64, 96),
    "6M": Size(256, 768, 6, 4, 4000, 4, 4, 96, 96),
    "shared heads": Size(128, 384, 5, 4, 1000, 4, 4, 64, 96, kv_heads=1),
}
CASES = [
    ("1.5M", Workload(4, 4, 24, 40), {"dtype": "bfloat16", "head_dtype": "float32"}),
    ("0.2M", Workload(16, 8, 64, 16), {"max_prefill_tokens": 256}),  # batches that merge
    ("0.2M", Workload(12, 4, 40, 30), {"max_batch_rows": 12}),  # in turns
    ("1.5M", Workload(16, 1, 256, 4), {"attention": "eager"}),  # mostly prompts
    ("1.5M", Workload(2, 2, 700, 4), {"max_prefill_tokens": 512}),  # a prompt in parts
    *(
        pytest.param(*case, marks=pytest.mark.faults)  # other sizes on the same way
        for case in (
            ("0.2M", Workload(4, 8, 64, 64), {}), ("1.5M", Workload(4, 4, 24, 40), {"dtype": "bfloat16"}),
            ("6M", Workload(2, 2, 64, 40), {}),
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("model") for name in SIZES}
    for name, folder in made.items():
        build(SIZES[name], folder)
    return made


@pytest.mark.parametrize(("name", "work", "options"), CASES)
async def test_the_estimate_is_within_a_tenth_of_the_peak(folders, name, work, options):
    told, peak = await tensors(str(folders[name]), work, requests_of(work, SIZES[name].vocab), **options)
    assert told == pytest.approx(peak, rel=0.1)


async def test_so_it_is_of_few_cached_heads_and_prompts_of_many_lengths(folders):
    work, size = Workload(2, 8, 100, 90), SIZES["shared heads"]
    told, peak = await tensors(str(folders["shared heads"]), work, requests_of(work, size.vocab, shorter=40))
    assert told == pytest.approx(peak, rel=0.1)


def test_a_plan_reports_more_requests_than_the_engine_runs_at_once(folders):
    engine = TransformersEngine(TransformersEngine.options_model()(max_batch_rows=4))
    spec = EngineSpec(model={"path": str(folders["0.2M"]), "dtype": "float32"}, max_context=64)
    assert len(engine.estimate(spec, Workload(1, 4, 24, 40)).notes) == 1
    assert "rows join a batch" in engine.estimate(spec, Workload(2, 4, 24, 40)).notes[1]


def test_a_reservation_grows_by_half_and_in_steps_of_sixteen_columns():
    assert [rounded(columns) for columns in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [grown(*sizes) for sizes in ((0, 5), (10, 10), (10, 11), (10, 40))] == [5, 10, 15, 40]
