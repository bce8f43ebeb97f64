"""{{ cookiecutter.help }}."""
