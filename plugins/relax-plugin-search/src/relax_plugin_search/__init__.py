# SPDX-License-Identifier: Apache-2.0
"""The environment `search`: a tool with which the policy searches a file of documents."""
