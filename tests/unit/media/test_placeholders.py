# SPDX-License-Identifier: Apache-2.0
"""Placeholders: one a medium as rendered, as many as it takes for the model, and nothing that only looks like one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.api.family import Rendered
from relax_core.rollout.placeholders import Held, MediaRefused, held

IDS = {"image": 6, "video": 7}
TEXT = st.lists(st.integers(10, 99), max_size=5)
KEYS = st.text("0123456789abcdef", min_size=4, max_size=4)
MEDIA = st.lists(st.builds(Held, st.sampled_from(sorted(IDS)), KEYS, st.integers(1, 9)))


@given(media=MEDIA, data=st.data())
def test_tokens_stay_in_order_and_each_medium_gets_its_own(media, data):
    tokens, wanted = list(data.draw(TEXT)), []
    wanted += tokens
    for one in media:
        said = data.draw(TEXT)
        tokens += [IDS[one.kind], *said]
        wanted += [IDS[one.kind]] * one.num_tokens + said
    got = held(Rendered(tuple(tokens), ("a",) * len(media)), media, IDS)
    assert got == Rendered(tuple(wanted), tuple(one.key for one in media))


@given(media=MEDIA, tokens=st.lists(st.integers(0, 12)))
def test_whatever_does_not_fit_together_is_refused(media, tokens):
    kinds = [next(kind for kind, number in IDS.items() if number == token) for token in tokens if token in (6, 7)]
    if kinds == [one.kind for one in media]:
        assert len(held(Rendered(tuple(tokens)), media, IDS).media) == len(media)
    else:
        with pytest.raises(MediaRefused, match="placeholders of .* for media of"):
            held(Rendered(tuple(tokens)), media, IDS)


def test_a_kind_that_the_model_has_no_token_for():
    with pytest.raises(MediaRefused, match="no audio_token_id"):
        held(Rendered((6,)), [Held("audio", "k", 3)], IDS)
