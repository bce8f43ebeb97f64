# SPDX-License-Identifier: Apache-2.0
"""A group with a greedy member: drawn at temperature 0, judged, compared with, never trained."""

from tests.unit.roles.theatre import Theatre


def test_the_greedy_sample_is_judged_and_not_trained(tmp_path):
    theatre = Theatre(tmp_path, algorithm="remax", steps=4)
    performance = theatre.play()
    assert performance.account.balanced
    assert performance.account.issued == performance.account.trained == 4 * 4 * (4 + 1)
    chunks = performance.of("actor-rank", "accumulate")
    assert chunks and all("reward/greedy" in step.metrics for step in performance.steps)
    samples = [
        sample for event in performance.events if type(event).__name__ == "SamplesScored" for sample in event.samples
    ]
    assert {sample["sample_index"] for sample in samples} == {0, 1, 2, 3, 4}


def test_the_greedy_sample_alone_is_drawn_at_temperature_0(tmp_path, monkeypatch):
    from tests.unit.roles import theatre as stage

    asked = []
    stream = stage.Puppet.stream

    def listening(self, method, *args, timeout_s):
        if method == "generate":
            asked.extend(request.temperature for request in args[0])
        return stream(self, method, *args, timeout_s=timeout_s)

    monkeypatch.setattr(stage.Puppet, "stream", listening)
    Theatre(tmp_path, algorithm="remax", steps=2).play()
    assert asked.count(0.0) * 4 == asked.count(1.0) > 0
