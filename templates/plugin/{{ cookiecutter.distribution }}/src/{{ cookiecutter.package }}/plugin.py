"""The components of this plugin, named by strings so that listing them imports nothing heavy."""

from relax_core.api import Component, hook


@hook
def {{ cookiecutter.hook }}() -> list[Component]:
    return [
        Component(
            "{{ cookiecutter.name }}",
            "{{ cookiecutter.package }}.{{ cookiecutter.module }}:{{ cookiecutter.class_name }}",
            "{{ cookiecutter.help }}",
        )
    ]
