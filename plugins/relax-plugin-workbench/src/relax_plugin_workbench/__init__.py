# SPDX-License-Identifier: Apache-2.0
"""Commands that examine a configuration, a machine or a finished run without training."""
