# SPDX-License-Identifier: Apache-2.0
"""A sink whose package or account is missing refuses the run before anything starts, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.control.prepare import check_sinks, plan_run, prepare
from tests.graph.conftest import Relax, relax

__all__ = ["relax"]

SINKS = """
from relax_core.api import ConfigError, Sink

class Quiet(Sink):
    def metrics(self, step, values): ...
    def open(self, run_dir, name, config): ...

class NoAccount(Quiet):
    def check(self):
        raise ConfigError("sinks.no-account", "no API key", "run `service login`")

class Exits(Quiet):
    def check(self):
        raise SystemExit(1)

class NoPackage(Quiet):
    def check(self):
        import no_such_client
"""


@pytest.fixture
def sinks(tmp_path: Path) -> list[str]:
    (tmp_path / "sinks_of_tests.py").write_text(SINKS)
    return [f'plugins=["{tmp_path}/sinks_of_tests.py"]']


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("no-account", ConfigError, r"sinks\.no-account: got no API key; run `service login`"),
        ("exits", PluginError, "sink 'exits'.* is not ready: SystemExit: 1"),
        ("no-package", PluginError, "is not ready: ModuleNotFoundError: No module named 'no_such_client'"),
    ],
)
def test_a_run_with_a_sink_that_is_not_ready_begins_nothing(
    sinks: list[str], tmp_path: Path, name: str, error: type[RelaxError], said: str
) -> None:
    overrides = [*sinks, f'sinks=["quiet", "{name}"]']
    with pytest.raises(error, match=said):
        prepare(["quickstart"], overrides, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sink_that_is_ready_passes(sinks: list[str]) -> None:
    planned = plan_run(["quickstart"], [*sinks, 'sinks=["quiet"]'])
    check_sinks(planned.composed.config, planned.catalogue)


def test_the_dry_run_checks_sinks_too(relax: Relax, sinks: list[str]) -> None:
    refused = relax("train", "quickstart", *sinks, 'sinks=["no-account"]', "--dry-run")
    assert refused.code == 2 and "run `service login`" in refused.err


def test_a_second_table_of_a_sink_is_refused(sinks: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"sinks\.1\.name.*a second 'quiet'"):
        plan_run(["quickstart"], [*sinks, 'sinks=["quiet", "quiet"]'])
