# SPDX-License-Identifier: Apache-2.0
"""Code: a tiny model writes programs from descriptions, judged by the programs' output in a sandbox."""
