# SPDX-License-Identifier: Apache-2.0
"""The report, the samples and the bundle of a run."""
