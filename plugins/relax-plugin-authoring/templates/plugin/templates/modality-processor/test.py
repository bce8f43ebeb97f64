"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and tests of its tensors{% endif %}."""

{% if not cookiecutter.moved -%}
import base64
import io
import wave

import numpy as np
import pytest

from relax_core.api import Media
{% endif -%}
from relax_core.testing.modality_processor import ModalityProcessorSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}

{% if not cookiecutter.moved %}
def sound(samples, width=2):
    """Return a WAV file of 1000 samples a second."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(width)
        writer.setframerate(1000)
        writer.writeframes(np.asarray(samples, f"<i{width}").tobytes())
    return file.getvalue()


DATA = sound(range(-50, 50))


{% endif -%}
class TestConformance(ModalityProcessorSuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # set `media` and `data` to a medium of your kind, then remove this line
{%- else %}
    data = DATA
    media = Media("audio", "data:audio/wav;base64," + base64.b64encode(DATA).decode())


def test_samples_keep_their_order_and_the_last_frame_is_filled_up():
    made = {{ cookiecutter.class_name }}().process(TestConformance.media, DATA, {})
    values = made.tensors["sound"]
    assert values.shape == (3, 40)
    assert (values.reshape(-1)[:100] * 32768).tolist() == list(range(-50, 50))
    assert not values.reshape(-1)[100:].any()


def test_another_number_format_is_refused():
    with pytest.raises(ValueError, match="32 bits"):
        {{ cookiecutter.class_name }}().process(TestConformance.media, sound(range(9), 4), {})
{%- endif %}
