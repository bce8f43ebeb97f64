# SPDX-License-Identifier: Apache-2.0
"""The Ray runner: each role is a Serve application, workers are actors, and storage actors own the payloads of the bus.

This is the only package of the core that imports ray. Importing any of its modules first sets Ray's environment
variables. The runner shuts down only the cluster, applications and actors that this run has started.
"""

from relax_core.runners.ray.environment import settle

settle()
