# SPDX-License-Identifier: Apache-2.0
"""Files that run Relax on a cluster: manifests for KubeRay, a script for Slurm, a Dockerfile."""
