# SPDX-License-Identifier: Apache-2.0
"""A line of JSON has only what JSON has, whatever it is made from."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from relax_core.api.trajectory import Outcome
from relax_core.observe.files import encode, plain

leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just(Outcome.FINISHED))
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner), max_leaves=20
)


@given(values)
def test_a_line_is_the_plain_value_as_strict_json(value: Any) -> None:
    assert encode(value) == json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"a": math.nan, "b": [math.inf, 1.5]}, '{"a":null,"b":[null,1.5]}'),
        ({"a": np.float32(0.5), "b": np.float32("nan"), "c": np.array(3)}, '{"a":0.5,"b":null,"c":3}'),
        (MappingProxyType(OrderedDict(b=1, a=(2,))), '{"b":1,"a":[2]}'),
        ({("x", 1): {2}}, "{\"('x', 1)\":[2]}"),
        ({"error": ValueError("no")}, '{"error":"no"}'),
    ],
)
def test_values_that_json_lacks_become_null_a_list_or_text(value: Any, line: str) -> None:
    assert encode(value) == line
