# SPDX-License-Identifier: Apache-2.0
"""The runner that a configuration names, and one that gets ready while the run is still being prepared."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue
from relax_core.runners.launch import Runner


def make_runner(config: RunConfig, catalogue: Catalogue) -> Runner:
    """The runner that `[run] runner` names; ray is imported only when it is that one."""
    if config.run.runner == "ray":
        from relax_core.runners.ray.environment import settle

        settle()
        from relax_core.runners.ray.runner import RayRunner

        return RayRunner(catalogue)
    if config.run.runner == "inline":
        from relax_core.runners.inline import InlineRunner

        return InlineRunner(catalogue)
    from relax_core.runners.local.runner import LocalRunner

    return LocalRunner(catalogue)


class RunnerAhead:
    """Imports the runner and begins its start in a thread: seconds that a recipe's build would hide."""

    def __init__(self, config: RunConfig, catalogue: Catalogue) -> None:
        thread = ThreadPoolExecutor(1, "runner")
        self._made = thread.submit(_begun, config, catalogue)
        thread.shutdown(wait=False)

    def take(self) -> Runner:
        """The runner, whose `start` waits for what has begun; raises what kept it from being made."""
        return self._made.result()

    def close(self) -> None:
        """No run will use it."""
        if self._made.exception() is None:
            asyncio.run(self.take().close())


def _begun(config: RunConfig, catalogue: Catalogue) -> Runner:
    runner = make_runner(config, catalogue)
    runner.prepare()
    return runner
