# SPDX-License-Identifier: Apache-2.0
"""Published versions of weights, the routes to them, and proofs of what arrived. It holds no model and imports no torch."""
