"""The components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api import Component, hook


@hook
def relax_inference_backends() -> list[Component]:
    return [
        Component(
            "{{ cookiecutter.name }}",
            "{{ cookiecutter.package }}.engine:{{ cookiecutter.class_name }}",
            "{{ cookiecutter.help }}",
        )
    ]
