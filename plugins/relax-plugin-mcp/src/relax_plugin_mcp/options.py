# SPDX-License-Identifier: Apache-2.0
"""Options of the environment `mcp`: its servers, how each is reached, and what the policy may call and is shown of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from relax_core.api import Options
from relax_core.api.options import Secret

SecretOrText = Annotated[Secret | str, Field(union_mode="left_to_right")]


class ServerOptions(Options):
    """One server: a program that speaks on its standard input and output, or an address."""

    name: str = Field(min_length=1)
    """Its name, in messages and beside its digest."""
    command: tuple[str, ...] = ()
    """The program with its arguments; `python` as the first word is the interpreter of the run."""
    url: str = Field("", pattern="^(https?://.+)?$")
    """Instead of a program: the address of a server that runs already (streamable HTTP)."""
    per: Literal["sample", "worker"] = "sample"
    """`sample`: each sample has a server, or a session with it, of its own; `worker`: all samples of a process share one, whose
    tools then must not remember."""
    allow: tuple[str, ...] = ()
    """Tools that the policy may call, by the server's names; empty: all."""
    prefix: str = ""
    """Put before the names of its tools, where two servers have tools of one name."""
    digest: str = ""
    """The digest of its tools that `relax train --dry-run` prints: a run with others is refused. Empty: any tools."""
    env: dict[str, SecretOrText] = {}
    """Further variables of the program; credentials as `"env:NAME"` or `"file:PATH"`. It has the path, the home and the
    language of its worker, and nothing else of it."""
    directory: Path | None = None
    """Directory in which the program starts; none: that of its worker."""
    headers: dict[str, SecretOrText] = {}
    """Further headers of requests to the address; credentials as `"env:NAME"` or `"file:PATH"`."""
    start_s: PositiveFloat = 30.0
    """Longest time until it has told its tools."""
    call_s: PositiveFloat = 30.0
    """Longest time of one call; then the outcome of the sample is `environment_error`."""
    result_bytes: PositiveInt = 16384
    """Most bytes of a result's text that the policy is shown."""

    @model_validator(mode="after")
    def _reached_one_way(self) -> ServerOptions:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"server {self.name!r} needs a command or a url, and not both")
        if self.url and (self.env or self.directory):
            raise ValueError(f"server {self.name!r} has a url; env and directory belong to a command")
        if self.command and self.headers:
            raise ValueError(f"server {self.name!r} has a command; headers belong to a url")
        return self


class McpOptions(Options):
    """Options of `mcp`. All that a turn calls is one call of the environment, bounded by its `timeout_s`."""

    servers: tuple[ServerOptions, ...]
    """The servers, `[[environment.servers]]`."""
    images: bool = True
    """Show the policy the images that tools return, which needs a model that sees and `media = ["image"]`; false: say in
    words that there was one."""
    calls_per_turn: PositiveInt = 8
    """Calls of one turn that are made; the policy is told that further ones were not."""

    @model_validator(mode="after")
    def _named_apart(self) -> McpOptions:
        if not self.servers:
            raise ValueError("there is no server: write a table [[environment.servers]]")
        names = [server.name for server in self.servers]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two servers are named {twice[0]!r}")
        return self
