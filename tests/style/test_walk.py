# SPDX-License-Identifier: Apache-2.0
"""The classes that the walk follows exist."""

from __future__ import annotations

import pytest

from tests.style.walk import FORMS, check_forms


def test_every_class_that_the_walk_follows_exists() -> None:
    check_forms(FORMS)


def test_a_class_that_does_not_exist_is_named() -> None:
    with pytest.raises(LookupError, match="no class Gone, Lost; correct FORMS"):
        check_forms({"sample": {"Task", "Lost"}, "publish": {"Gone"}})
