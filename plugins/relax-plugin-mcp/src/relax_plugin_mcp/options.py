# SPDX-License-Identifier: Apache-2.0
"""Options of the environment `mcp`: servers, ways to reach them, and the tools and results shown to the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from relax_core.api import Options
from relax_core.api.options import Secret

SecretOrText = Annotated[Secret | str, Field(union_mode="left_to_right")]


class ServerOptions(Options):
    """One server: a program with messages on its standard input and output, or an address."""

    name: str = Field(min_length=1)
    """Name of the server in messages and in the output of `relax train --dry-run`."""
    command: tuple[str, ...] = ()
    """The server's program with its arguments; a first word `python` means the run's interpreter."""
    url: str = Field("", pattern="^(https?://.+)?$")
    """Address of a running server (streamable HTTP), instead of a program."""
    per: Literal["sample", "worker"] = "sample"
    """Sharing of the server. `sample`: each sample gets its own program, or its own session at a `url`; `worker`: all
    samples of a process share one program or session, so the tools must be stateless."""
    allow: tuple[str, ...] = ()
    """Tools that the policy may call, by the server's names; empty: all tools."""
    prefix: str = ""
    """Prefix that is added to the names of the server's tools; needed if two servers have tools of the same name."""
    digest: str = ""
    """Expected digest of the server's tools, as `relax train --dry-run` prints it. If the tools have a different digest,
    the run does not start. Empty: accept any tools."""
    env: dict[str, SecretOrText] = {}
    """Further environment variables of the program; write credentials as `"env:NAME"` or `"file:PATH"`. From its worker
    the program inherits only `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR`, `VIRTUAL_ENV`, `PYTHONPATH`, and the variables of
    certificates and package indexes (`SSL_CERT_FILE`, `SSL_CERT_DIR`, `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`, `PIP_*`,
    `UV_*`) without credentials."""
    directory: Path | None = None
    """Directory in which the program starts; None: the worker's directory."""
    headers: dict[str, SecretOrText] = {}
    """Further headers of requests to `url`; write credentials as `"env:NAME"` or `"file:PATH"`."""
    start_s: PositiveFloat = 30.0
    """Time limit in seconds for starting the server and listing its tools."""
    call_s: PositiveFloat = 30.0
    """Time limit of a tool call in seconds; after a timeout the sample's outcome is `environment_error`."""
    result_bytes: PositiveInt = 16384
    """Maximum number of bytes of a result's text that the policy sees; the rest is cut off."""

    @model_validator(mode="after")
    def _reached_one_way(self) -> ServerOptions:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"server {self.name!r}: set either command or url, and not both")
        if self.url and (self.env or self.directory):
            raise ValueError(f"server {self.name!r} has a url; remove env and directory, which belong to a command")
        if self.command and self.headers:
            raise ValueError(f"server {self.name!r} has a command; remove headers, which belong to a url")
        return self


class McpOptions(Options):
    """Options of `mcp`. The environment's `timeout_s` limits the total time of all calls of a turn."""

    servers: tuple[ServerOptions, ...]
    """The MCP servers, one table `[[environment.servers]]` each."""
    images: bool = True
    """True: show images that tools return to the policy; this needs a vision model and `media = ["image"]`. False:
    replace each image by a line of text."""
    calls_per_turn: PositiveInt = 8
    """Maximum number of tool calls in a turn; the result of each further call is an error text."""

    @model_validator(mode="after")
    def _named_apart(self) -> McpOptions:
        if not self.servers:
            raise ValueError("no server: add a table [[environment.servers]]")
        names = [server.name for server in self.servers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two servers are named {twice[0]!r}; rename one")
        return self
