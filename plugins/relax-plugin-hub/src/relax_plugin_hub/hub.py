# SPDX-License-Identifier: Apache-2.0
"""The upload of a model folder to the Hugging Face Hub, with the account that `hf auth login` configured.

The token is read only where Hugging Face's own tools read it: HF_TOKEN, and the file of `hf auth login`. HF_ENDPOINT
names another server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from relax_core.api.checks import CheckFinding, PreflightFacts
from relax_core.api.errors import ConfigError, InfrastructureError
from relax_plugin_hub.table import HubTable

_LOGIN = "run `hf auth login`, or set HF_TOKEN to a token with write access"
_SIGNED = re.compile(r"(https?://[^\s?]+)\?\S+")
"""A URL with a query, which may hold a signature that permits an upload."""
ACCOUNT = "this machine has a token for the Hugging Face Hub"


def check_repository(repository: str, field: str = "--push-to") -> None:
    """Raise ConfigError for `field` unless `repository` is USER/NAME and this machine has a token. Calls no server."""
    if find_spec("huggingface_hub") is None:
        raise ConfigError(field, "no package huggingface_hub", "pip install 'relax-plugin-hub[client]'")
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    fix = 'write "USER/NAME", with your account or organization at the Hub'
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(field, repr(repository), fix) from error
    if repository.count("/") != 1:
        raise ConfigError(field, repr(repository), fix)
    if constants.is_offline_mode():
        raise ConfigError(field, "the Hub switched off", "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
    if get_token() is None:
        raise ConfigError(field, "no token of the Hugging Face Hub", _LOGIN)


def account(facts: PreflightFacts) -> Iterator[CheckFinding]:
    """Check that `hub.push_to` is USER/NAME and that this machine has a token; call no server."""
    table = HubTable.model_validate(facts.config.get("hub", {}))
    if not table.push_to:
        return
    try:
        check_repository(table.push_to, "hub.push_to")
    except ConfigError as error:
        yield CheckFinding(ACCOUNT, "failed", str(error.got), advice=error.fix, field=error.field)
    else:
        yield CheckFinding(ACCOUNT, "ok", table.push_to)


def check_account(repository: str) -> None:
    """Raise ConfigError unless `repository` is USER/NAME and a token that may write is accepted by the Hub.

    Raises InfrastructureError if the Hub does not answer.
    """
    check_repository(repository)
    from huggingface_hub import HfApi

    with _hub_errors("--push-to", "nothing was exported; try again"):
        user = HfApi().whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError("--push-to", f"a token of {user.get('name')} that may only read", _LOGIN)


def push(folder: Path, repository: str, public: bool, message: str, field: str = "--push-to") -> str:
    """Upload a folder as one commit to the model `repository`, which is created if it is missing; return its address.

    `public`: visibility of a new repository; an existing repository keeps its own. `field`: the setting that errors
    name. Raises ConfigError for a refused token and InfrastructureError for other failures; the folder is kept.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _hub_errors(field, f"the model is in {folder}; send it with `hf upload {repository} {folder}`"):
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    return str(address)


@contextmanager
def _hub_errors(field: str, advice: str) -> Iterator[None]:
    """Raise failures of the Hub as errors of Relax; `advice` is the fix."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # HTTPError: the base of its HTTP library's errors

    try:
        yield
    except HfHubHTTPError as error:
        said = _said(error)
        if error.response.status_code in (401, 403):
            raise ConfigError(field, f"a token that the Hub refuses ({said})", f"{_LOGIN}; {advice}") from error
        raise InfrastructureError(f"the Hugging Face Hub failed: {said}; {advice}") from error
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # an upload reports its causes in any of them
        raise InfrastructureError(f"the Hugging Face Hub did not take the request: {_said(error)}; {advice}") from error


def _said(error: Exception) -> str:
    """Return the text of an error on one line, with URLs without their queries."""
    return _SIGNED.sub(r"\1", " ".join(str(error).split()))
