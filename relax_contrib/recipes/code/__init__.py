# SPDX-License-Identifier: Apache-2.0
"""Code: a tiny model writes programs from descriptions, and is judged by what they answer in a sandbox."""
