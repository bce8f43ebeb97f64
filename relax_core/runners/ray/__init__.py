# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: every role a Serve application of its own, worker groups as actors, payloads owned by storage actors.

The only package of the core that imports ray, and it settles Ray's environment first, whichever module is wanted. Nothing
is shut down here that this run did not start.
"""

from relax_core.runners.ray.environment import settle

settle()
