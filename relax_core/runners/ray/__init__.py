# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: each role is a Serve application, workers are actors, and storage actors own the payloads of the bus.

This is the only package of the core that imports ray. It sets Ray's environment variables first, whichever module is
imported. It shuts down only what this run has started.
"""

from relax_core.runners.ray.environment import settle

settle()
