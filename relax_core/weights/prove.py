# SPDX-License-Identifier: Apache-2.0
"""Proof that a publish is what it claims: consecutive manifests compared name by name.

Transports prove that bytes arrived; this catches the right transport of the wrong thing: an update that changed
nothing, a tensor that vanished or was renamed.
"""

from __future__ import annotations

from relax_core.api.errors import InfrastructureError
from relax_core.api.weights import Manifest


def prove_successor(before: Manifest | None, after: Manifest, *, applied: bool) -> None:
    """Refuse a manifest that can't follow `before`; `applied`: an update with a non-zero learning rate lies between.

    Raises InfrastructureError, since only a new publish or a restart of the trainer helps.
    """
    if before is None or (after.payload == "lora") != (before.payload == "lora"):
        return
    if after.version == before.version:
        return  # the same one again, whole instead of as a delta
    _prove_names(before, after)
    if applied and unchanged_names(before, after) == frozenset(info.name for info in after.tensors):
        raise InfrastructureError(
            f"{after.version}: all {len(after.tensors)} tensors equal {before.version} although an update was applied; "
            "the publish sent stale bytes or the optimizer updates another copy"
        )


def unchanged_names(before: Manifest, after: Manifest) -> frozenset[str]:
    """Names whose bytes are the same in both."""
    old = {info.name: info.fingerprint for info in before.tensors}
    return frozenset(info.name for info in after.tensors if old.get(info.name) == info.fingerprint)


def _prove_names(before: Manifest, after: Manifest) -> None:
    old = {info.name: (info.shape, info.dtype) for info in before.tensors}
    new = {info.name: (info.shape, info.dtype) for info in after.tensors}
    if old.keys() != new.keys():
        lacking, extra = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        raise InfrastructureError(
            f"{after.version}: lacks {lacking} and has {extra} beyond {before.version}; publish the whole model"
        )
    for name, have in new.items():
        if have != old[name]:
            raise InfrastructureError(f"{after.version} {name}: have {have}, want {old[name]} as in {before.version}")
