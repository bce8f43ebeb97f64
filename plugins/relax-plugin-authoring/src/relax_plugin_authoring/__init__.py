# SPDX-License-Identifier: Apache-2.0
"""New plugin projects from templates, and checks of plugins."""
