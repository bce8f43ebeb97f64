# SPDX-License-Identifier: Apache-2.0
"""Finding, importing and building components, and every way in which a name can be wrong."""

import pytest

from relax_core.api import Chosen, ConfigError, InfrastructureError, PluginError, Reward
from relax_core.registry import Catalogue, ResolvedPlugin
from relax_core.registry.catalogue import installable


def load(*files: str) -> Catalogue:
    return Catalogue.load(files, environ={})


def test_a_component_is_built_with_its_options(half):
    half()
    reward = load().build(Chosen("reward", "half", {"scale": 3}))
    assert isinstance(reward, Reward)
    assert reward.score(None, None) == 1.5


@pytest.mark.parametrize(
    ("options", "field", "fix"),
    [
        ({"scal": 3}, "reward.half.scal", "did you mean 'scale'"),
        ({"scale": "wide"}, "reward.half.scale", "valid number"),
        ({"scale": "wide", "strictness": "very"}, "reward.half.scale", "(and 1 more)"),
    ],
)
def test_wrong_options_name_kind_component_and_key(half, options, field, fix):
    half()
    with pytest.raises(ConfigError) as caught:
        load().build(Chosen("reward", "half", options))
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_two_components_of_one_name_need_their_distribution(half):
    half("fake-a")
    half("fake-b")
    catalogue = load()
    with pytest.raises(ConfigError, match="fake-a:half or fake-b:half"):
        catalogue.find("reward", "half")
    assert catalogue.find("reward", "fake-b:half").distribution == "fake-b"
    assert catalogue.target("reward", "fake-a:half").__module__ == "fake_a.reward"
    assert "half" in catalogue.names("reward")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("reward", "haf", "did you mean 'half'"),
        ("trainer", "deepspeed", "no plugin offers it; known names are .*torch"),
        ("environment", "half", "offers it as a component of kind reward; move it to .rewards."),
        ("reward", "other-dist:half", "write fake-half:half"),
        ("rewards", "half", "did you mean 'reward'"),
    ],
)
def test_an_unknown_name_says_what_to_do(half, kind, name, said):
    half()
    with pytest.raises(ConfigError, match=said):
        load().find(kind, name)


def test_a_component_of_a_plugin_that_is_not_installed_names_the_plugin(monkeypatch):
    monkeypatch.setitem(installable(), "trainer", {"other": "relax-plugin-other"})
    for name in ("other", "relax-core:other"):
        with pytest.raises(ConfigError, match=f"'{name}'; its plugin is not installed; pip install relax-plugin-other"):
            load().find("trainer", name)


def test_the_core_is_still_named_for_a_component_that_moved_to_a_plugin():
    """A run directory keeps the name that its configuration had when the core offered the component."""
    assert load().find("model-family", "relax-core:chat") == load().find("model-family", "chat")
    with pytest.raises(ConfigError, match="no plugin offers it"):
        load().find("model-family", "relax-core:other")


def test_a_known_component_that_its_installed_distribution_lacks_asks_for_an_upgrade(site):
    site.install("relax-plugin-vllm", "", module="fake_vllm.plugin")
    site.write("fake_vllm/__init__.py", "")
    site.write("fake_vllm/plugin.py", "")
    with pytest.raises(ConfigError, match="pip install --upgrade relax-plugin-vllm"):
        load().find("engine", "vllm")


GOLD = "import no_such_thing\n@hook\ndef relax_rewards():\n    return [Component('gold', 'a:B', '')]"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("gold", PluginError, "fake-bad 1.0 offers it but failed: ModuleNotFoundError"),
        ("fake-bad:anything", PluginError, "No module named 'no_such_thing'"),
        ("nothing-like-it", ConfigError, "fake-bad 1.0 failed to load"),
    ],
)
def test_a_plugin_that_failed_is_named_where_its_name_is_not_found(site, name, error, said):
    site.install("fake-bad", GOLD)
    with pytest.raises(error, match=said) as caught:
        load().find("reward", name)
    if error is PluginError:
        assert "import no_such_thing" in caught.value.frames
        assert caught.value.exit_code == 3


def test_a_refused_plugin_that_would_have_offered_the_name_gives_its_reason(half):
    half(requires=())
    with pytest.raises(ConfigError, match="fake-half 1.0 offers it but was skipped: .*no API range"):
        load().find("reward", "half")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("class Half: pass", "is not a component of kind reward; derive it from relax_core.api.reward:Reward"),
        ("def Half(): pass", "not a class"),
        ("from relax_core.api import Reward\nclass Half(Reward): pass", "does not define score"),
        (
            "from relax_core.api import Reward\nclass Half(Reward):\n    def score(self): return 1.0",
            r"Half.score\(self\) cannot be called as Reward.score\(self, task.*write it with these parameters",
        ),
        ("from relax_core.api import Environment\nclass Half(Environment): pass", "is not a component of kind reward"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("Other = 1", "has no attribute 'Half'"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_a_target_that_is_not_a_component_is_the_plugins_fault(half, reward, said):
    half(files={"reward.py": reward})
    with pytest.raises(PluginError, match=f"reward 'half' of fake-half 1.0.*{said}"):
        load().target("reward", "half")


def test_a_missing_package_of_an_extra_says_which_to_install(half):
    requires = ("relax-core>=0.1,<0.2", 'heavy_engine_x>=3; extra == "heavy"', 'other; extra == "dev"')
    half(requires=requires, files={"reward.py": "import heavy_engine_x.core"})
    with pytest.raises(ConfigError, match=r"heavy_engine_x.*; pip install 'fake-half\[heavy\]'"):
        load().target("reward", "half")


@pytest.mark.parametrize("base", ["BatchReward", "GroupReward"])
def test_every_base_of_a_kind_is_accepted(half, base):
    method = {"BatchReward": "score_batch", "GroupReward": "score_group"}[base]
    half(files={"reward.py": f"from relax_core.api import {base}\nclass Half({base}):\n  def {method}(self, *a): ..."})
    assert load().target("reward", "half").__name__ == "Half"


def test_a_constructor_that_raises_is_shown_with_the_plugins_frames(half):
    raising = "from relax_core.api import Reward\nclass Half(Reward):\n  score = None\n  def __init__(self, o): {}['x']"
    half(files={"reward.py": raising})
    with pytest.raises(PluginError, match="cannot be built: KeyError") as caught:
        load().build(Chosen("reward", "half"))
    assert "reward.py" in caught.value.frames and "catalogue.py" not in caught.value.frames


class Seven(Reward):
    def score(self, task, trajectory):
        return 7.0


class Eight(Seven):
    pass


def test_a_class_passed_from_python_is_a_component_and_the_last_of_a_name_counts():
    catalogue = load()
    catalogue.add("reward", "lucky", Eight)
    catalogue.add("reward", "lucky", Seven)
    assert catalogue.build(Chosen("reward", "lucky")).score(None, None) == 7.0
    assert catalogue.find("reward", "python:lucky").distribution == "python"
    assert "lucky" in catalogue.names("reward")


def test_the_observers_are_the_plugins_with_an_observer_hook(site, half):
    half()
    site.install("fake-watch", "@hook\ndef relax_step_finished(event):\n    pass")
    observers = {name.partition(":")[0] for name in load().observers()}
    assert "fake-watch" in observers and "fake-half" not in observers


def test_every_event_that_observers_get_has_its_hook():
    from relax_core.api.component import BY_HOOK
    from relax_core.registry.loader import HOOKS, PARTS, SPECIFIED

    assert set(HOOKS.values()) == set(SPECIFIED) - set(BY_HOOK) - set(PARTS)


PART = "@hook\ndef relax_autoscaler(policy, limits):\n    return policy, limits"


def test_one_plugin_makes_a_part_of_a_run_and_its_absence_names_the_distribution(site):
    deny = {"RELAX_DISABLE_PLUGINS": "relax-plugin-scaling"}
    (absent,) = Catalogue.load(environ=deny).lacking("relax_autoscaler", "autoscale", "balance")
    assert "relax-plugin-scaling 0.1.0 does not load (switched off: RELAX_DISABLE_PLUGINS" in absent.fix
    site.install("fake-limits", PART)
    made = Catalogue.load(environ=deny)
    assert not list(made.lacking("relax_autoscaler", "autoscale", "balance"))
    assert made.part("relax_autoscaler", policy="balance", limits="all", min_engines=1) == ("balance", "all")
    (several,) = load().lacking("relax_autoscaler", "autoscale", "balance")
    assert "fake-limits:" in several.fix and "relax-plugin-scaling:" in several.fix


def test_the_same_plugins_verify(half):
    half()
    catalogue = load()
    assert ResolvedPlugin("fake-half", "1.0", "") in catalogue.resolved
    catalogue.verify(catalogue.resolved)
    catalogue.verify([list(plugin) for plugin in catalogue.resolved])


def test_a_different_version_is_refused_naming_node_have_and_want(half):
    half()
    want = [p._replace(version="2.0") if p.name == "fake-half" else p for p in load().resolved]
    import platform

    with pytest.raises(InfrastructureError, match=f"{platform.node()}: have 1.0, want 2.0"):
        load().verify(want)


def test_of_an_interpreter_of_its_own_only_what_both_have_is_compared(half):
    want = load().resolved
    half()
    have = load()
    with pytest.raises(InfrastructureError, match="fake-half.*have 1.0, want none"):
        have.verify(want)
    have.verify([*want, ResolvedPlugin("fake-third", "3")], shared=True)
    other = [*want, ResolvedPlugin("fake-half", "2.0")]
    with pytest.raises(InfrastructureError, match="fake-half.*have 1.0, want 2.0"):
        have.verify(other, shared=True)


def test_a_package_that_is_missed_late_names_the_extra_that_installs_it(site):
    code = "@hook\ndef relax_sinks():\n    return [Component('far', 'fake_far.sink:Far', '')]"
    sink = """
        from relax_core.api import Sink

        class Far(Sink):
            def check(self):
                import fake_client

            def open(self, run_dir, name, config): ...
            def metrics(self, step, values): ...
    """
    requires = ("relax-core>=0.1,<0.2", 'fake-client>=1; extra == "client"')
    site.install("fake-far", code, requires=requires, files={"sink.py": sink})
    catalogue, chosen = load(), Chosen("sink", "far")
    with pytest.raises(ConfigError, match=r"sinks: got 'far'; .*pip install 'fake-far\[client\]'"), \
            catalogue.authored(chosen):  # fmt: skip
        catalogue.build(chosen).check()


TABLE = """
from relax_core.api import Table
@hook
def relax_tables():
    return [Table("{name}", "{package}.table:Limits", "Limits")]
"""
LIMITS = """
from relax_core.api import TableOptions
class Limits(TableOptions):
    {keys}
"""


def install_table(site, dist, name, keys="most: int = 1"):
    package = dist.replace("-", "_")
    site.install(dist, TABLE.format(name=name, package=package), files={"table.py": LIMITS.format(keys=keys)})


def test_a_table_of_two_plugins_is_noted_and_refused_where_it_is_used(site):
    install_table(site, "fake-a", "limits")
    install_table(site, "fake-b", "limits")
    catalogue = load()
    (first, _) = [record for record in catalogue.records if record.distribution in ("fake-a", "fake-b")]
    assert first.notes == ("table 'limits' is also in fake-b 1.0",)
    with pytest.raises(
        ConfigError, match=r"several plugins have this table: .*fake-a 1.0 and .*fake-b 1.0; uninstall one"
    ):
        catalogue.table("limits")


@pytest.mark.parametrize("name", ["rollout", "steps", "rewards", "autoscale"])
def test_a_plugin_whose_table_has_the_name_of_a_key_of_the_core_is_broken(site, name):
    install_table(site, "fake-a", name)
    (record,) = [record for record in load().records if record.distribution == "fake-a"]
    assert (
        record.state == "broken"
        and f"the plugin offers the table [{name}], which is a key of the core" in record.reason
    )
    (file := site.path / f"{name}.py").write_text(
        "from relax_core.api import TableOptions\nclass Mine(TableOptions): ..."
    )
    with pytest.raises(PluginError, match=rf"offers the table \[{name}\]"):
        load(str(file))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("most: int", "Limits requires most; give each key a default"),
        ("may_change = ('mst',); most: int = 1", "Limits.may_change names mst; name keys of the table"),
    ],
)
def test_a_table_that_no_run_could_use_is_the_plugins_fault(site, keys, said):
    install_table(site, "fake-a", "limits", keys)
    with pytest.raises(PluginError, match=said):
        load().table("limits")


def test_a_hook_of_checks_returns_checks_and_each_is_a_function_of_facts(site):
    code = "from relax_core.api import Check\n@hook\ndef relax_checks():\n    return [{}]"
    entry = "Check('x', 'fake_a.check:{}', 'X', stage='preflight')"
    site.install(
        "fake-a", code.format(entry.format("good")), files={"check.py": "def good(facts): ...\ndef bad(): ..."}
    )
    site.install("fake-b", code.format(entry.format("bad")).replace("'x'", "'y'"))
    site.install("fake-c", "@hook\ndef relax_checks():\n    return [Component('z', 'a:b', '')]")
    catalogue = load()
    assert callable(catalogue.target("check", "x"))
    with pytest.raises(PluginError, match="name a function with one parameter, `facts`"):
        catalogue.target("check", "y")
    (broken,) = [record for record in catalogue.records if record.distribution == "fake-c"]
    assert "it must return Check(name, target, help)" in broken.reason
