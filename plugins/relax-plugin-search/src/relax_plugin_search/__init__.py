# SPDX-License-Identifier: Apache-2.0
"""The environment `search`, whose tool searches a file of documents."""
