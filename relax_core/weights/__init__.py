# SPDX-License-Identifier: Apache-2.0
"""The weight service: published versions, the transports that move them, and proofs of what arrived.

It holds no model and imports no torch. A new way to move bytes is a `weight-transport` component.
"""
