# SPDX-License-Identifier: Apache-2.0
"""The components of this distribution, named by strings so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_rewards() -> list[Component]:
    return [
        Component("code", "relax_plugin_rewards.code:Code", "1 when the response's program passes every case"),
        Component("dapo", "relax_plugin_rewards.dapo:Dapo", "1 when the last `Answer:` is the answer, else -1"),
        Component("deepscaler", "relax_plugin_rewards.deepscaler:DeepScaler", "1 when the last box equals an answer"),
        Component("exact", "relax_plugin_rewards.exact:Exact", "1 when the whole response equals the answer"),
        Component("f1", "relax_plugin_rewards.f1:F1", "Overlap in words with the answer (SQuAD's F1), from 0 to 1"),
        Component(
            "format", "relax_plugin_rewards.form:Format", "1 when the response has tags, a pattern or JSON as asked"
        ),
        Component(
            "geo3k", "relax_plugin_rewards.geo3k:Geo3k", "A boxed length or angle near the answer, and the format"
        ),
        Component("gpqa", "relax_plugin_rewards.choices:Gpqa", "1 when the final choice of A to D is the answer"),
        Component(
            "instructions", "relax_plugin_rewards.instructions:Instructions", "1 when all instructions are followed"
        ),
        Component("judge", "relax_plugin_rewards.judge:Judge", "The verdict of another model on the response"),
        Component(
            "judge-pairs",
            "relax_plugin_rewards.judge_pairs:JudgePairs",
            "Another model's comparison of a group's responses",
        ),
        Component("maths", "relax_plugin_rewards.maths:Maths", "1 when the final expression equals the answer"),
        Component(
            "multiple-choice", "relax_plugin_rewards.choices:MultipleChoice", "1 when the final choice is the answer"
        ),
        Component("openr1mm", "relax_plugin_rewards.openr1mm:OpenR1MM", "A right answer, and the format in tags"),
        Component(
            "random",
            "relax_plugin_rewards.random_score:RandomScore",
            "A random number, for debugging and as a baseline",
        ),
        Component("overlong", "relax_plugin_rewards.form:Overlong", "DAPO's penalty for long responses, from 0 to -1"),
        Component("repetition", "relax_plugin_rewards.form:Repetition", "A penalty for n-grams that occur again"),
        Component("remote", "relax_plugin_rewards.remote:Remote", "The score that an HTTP service of yours returns"),
    ]
