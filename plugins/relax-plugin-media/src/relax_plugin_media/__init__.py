# SPDX-License-Identifier: Apache-2.0
"""The host of media processors, which keeps each processed medium for all prompts that show the medium."""
