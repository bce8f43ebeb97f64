# SPDX-License-Identifier: Apache-2.0
"""Discovery: what is refused, what is captured, what is reported twice."""

import re
import sys

import pytest

from relax_core.registry import Catalogue, PluginState, Record


def record(name: str, **environ: str) -> Record:
    return next(r for r in Catalogue.load(environ=environ).records if r.distribution == name)


def test_a_plugin_with_a_matching_range_is_found(half):
    half()
    found = record("fake-half")
    assert (found.state, found.version, found.api_range) == (PluginState.OK, "1.0", ">=0.1,<0.2")
    assert [(kind, component.name) for kind, component in found.components] == [("reward", "half")]


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ("numpy", '"relax-core>=0.1,<0.2"'),
        ("relax-core[torch]", "has no API range"),
        ('relax-core>=0.1,<0.2; extra == "dev"', "has no API range"),
        ("relax_core>=7,<8", ">=7,<8.*0.1.0|0.1.0.*>=7,<8"),
    ],
)
def test_a_plugin_without_a_range_for_this_core_is_refused_and_never_imported(site, requires, said):
    site.install("fake-other", "raise SystemError('imported')", requires=(requires,))
    found = record("fake-other")
    assert found.state is PluginState.SKIPPED
    assert re.search(said, found.reason)
    assert "fake_other.plugin" not in sys.modules


def test_unreadable_requirement_breaks_only_its_plugin(site, half):
    site.install("fake-damaged", "", requires=("relax-core >>> 3",))
    half()
    assert record("fake-damaged").state is PluginState.BROKEN
    assert record("fake-half").state is PluginState.OK


@pytest.mark.parametrize(
    "code",
    ["raise RuntimeError('no luck')", "import not_there_at_all", "raise SystemExit(3)", "def broken(:", "1 / 0"],
)
def test_a_plugin_that_fails_on_import_is_a_record_with_its_own_frames(site, half, code):
    site.install("fake-bad", code)
    half()
    bad = record("fake-bad")
    assert bad.state is PluginState.BROKEN
    assert "fake_bad" in bad.frames and "importlib" not in bad.frames and "loader.py" not in bad.frames
    assert record("fake-half").state is PluginState.OK


def test_a_hook_that_raises_breaks_its_plugin(site):
    site.install("fake-raises", "@hook\ndef relax_rewards():\n    raise KeyError('weights')")
    bad = record("fake-raises")
    assert bad.state is PluginState.BROKEN and "KeyError" in bad.reason and "relax_rewards" in bad.frames


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("@hook\ndef relax_reward():\n    return []", "did you mean 'relax_rewards'"),
        ("def relax_rewards():\n    return []", "put @hook"),
        ("@hook\ndef relax_step_finished(step):\n    pass", "step"),
        ("@hook\ndef relax_rewards():\n    return ['half']", "must return Component"),
        ("@hook\ndef relax_rewards():\n    return None", "must return a list"),
        ("@hook\ndef relax_rewards():\n    return [Component('My Half', 'a:B', '')]", "kebab-case"),
        ("@hook\ndef relax_rewards():\n    return [Component('half', 'a.b', '')]", "package.module:Class"),
        ("@hook\ndef relax_rewards():\n    return [Component('a', 'a:B', '')] * 2", "twice"),
    ],
)
def test_a_malformed_plugin_is_broken_with_what_to_fix(site, code, said):
    site.install("fake-malformed", code)
    bad = record("fake-malformed")
    assert bad.state is PluginState.BROKEN
    assert said in bad.reason
    assert bad.components == ()


def test_the_deny_list_switches_off_by_distribution(half):
    half()
    assert record("fake-half", RELAX_DISABLE_PLUGINS="other, Fake_Half").state is PluginState.SKIPPED


def test_the_allow_list_leaves_the_core_and_what_it_names(half):
    half()
    half("fake-other", "other")
    catalogue = Catalogue.load(environ={"RELAX_PLUGINS": "fake-other"})
    on = {r.distribution for r in catalogue.records if r.state is PluginState.OK}
    assert on == {"relax-core", "fake-other"}


def test_two_distributions_of_one_entry_point_name_are_both_loaded_and_reported(half):
    half("fake-a", "first", entry="shared")
    half("fake-b", "second", entry="shared")
    assert "fake-b 1.0" in record("fake-a").notes[0]
    assert "fake-a 1.0" in record("fake-b").notes[0]
    assert {"first", "second"} <= set(Catalogue.load(environ={}).names("reward"))


def test_two_distributions_with_one_module_are_distinguished(half, site):
    half("fake-a", "first")
    site.install("fake-z", "", module="fake_a.plugin")
    assert "fake-a 1.0 has the same module" in record("fake-z").reason
