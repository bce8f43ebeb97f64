# SPDX-License-Identifier: Apache-2.0
"""New plugin projects from templates, checks of plugins, and documentation of configurations."""
