"""What this distribution offers. Strings only: nothing heavy is imported to list it."""

from relax_core.api import Component, hook


@hook
def relax_environments() -> list[Component]:
    return [
        Component(
            "{{ cookiecutter.name }}",
            "{{ cookiecutter.package }}.environment:{{ cookiecutter.class_name }}",
            "{{ cookiecutter.help }}",
        )
    ]
