# SPDX-License-Identifier: Apache-2.0
"""A group with a greedy member: drawn at temperature 0, judged, compared with, never trained."""

from tests.unit.roles.simulated_run import SimulatedRun


def test_the_greedy_sample_is_judged_and_not_trained(tmp_path):
    simulation = SimulatedRun(tmp_path, algorithm="remax", steps=4)
    outcome = simulation.run()
    assert outcome.account.balanced
    assert outcome.account.issued == outcome.account.trained == 4 * 4 * (4 + 1)
    chunks = outcome.of("actor-rank", "accumulate")
    assert chunks and all("reward/greedy" in step.metrics for step in outcome.steps)
    samples = [
        sample for event in outcome.events if type(event).__name__ == "SamplesScored" for sample in event.samples
    ]
    assert {sample["sample_index"] for sample in samples} == {0, 1, 2, 3, 4}


def test_the_greedy_sample_alone_is_drawn_at_temperature_0(tmp_path, monkeypatch):
    from tests.unit.roles import simulated_run as stage

    asked = []
    stream = stage.SimulatedWorker.stream

    def listening(self, method, *args, timeout_s):
        if method == "generate":
            asked.extend(request.temperature for request in args[0])
        return stream(self, method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(stage.SimulatedWorker, "stream", listening)
    SimulatedRun(tmp_path, algorithm="remax", steps=2).run()
    assert asked.count(0.0) * 4 == asked.count(1.0) > 0
