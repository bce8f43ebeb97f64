# SPDX-License-Identifier: Apache-2.0
"""Servers for tests: `python servers.py KIND [ARGUMENTS]`. Good ones are written with the SDK, bad ones by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def made() -> Any:
    from mcp.server.mcpserver import Image, MCPServer

    server = MCPServer("tools")

    @server.tool(description="Add two numbers.")
    def add(a: int, b: int) -> str:
        return str(a + b)

    @server.tool(description="Divide two numbers.")
    def divide(a: int, b: int) -> str:
        return str(a // b)

    @server.tool(description="Say a word many times.")
    def repeat(word: str, times: int) -> str:
        return word * times

    @server.tool(description="Draw a pixel.", structured_output=False)
    def draw() -> list[Any]:
        import base64

        return ["a pixel", Image(data=base64.b64decode(PIXEL), format="png")]

    return server


def by_hand(kind: str, *arguments: str) -> None:
    """Speak the protocol of 2025 line by line, wrongly where the kind says so."""
    tools = [{"name": "act", "description": "Act.", "inputSchema": {"type": "object"}}]
    if kind == "silent":
        time.sleep(1000)
    if kind == "stray":
        print("Welcome to the server!", flush=True)
    if kind == "newer" and os.path.exists(arguments[0]):
        tools[0]["description"] = "Act otherwise."
    calls = 0
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        result: Any = {}
        if method == "initialize":
            result = {
                "protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "by hand", "version": "1"},
            }  # fmt: skip
        elif method == "server/discover":
            say({"id": number, "error": {"code": -32601, "message": "unknown"}})
            continue
        elif method == "tools/list":
            if kind == "endless":
                result = {"tools": [], "nextCursor": "more"}
            elif kind == "nonsense":
                result = {
                    "tools": [{"name": "act", "inputSchema": {"type": "object", "properties": {"a": {"type": 7}}}}]
                }
            elif kind == "odd":
                result = {"tools": [{"name": "act", "inputSchema": {"type": "object", "properties": 7}}]}
            else:
                result = {"tools": tools}
        elif method == "tools/call":
            calls += 1
            if kind == "stray":
                print("not a message", flush=True)
            text = {"content": [{"type": "text", "text": "x" * 20_000_000}]}
            if kind == "huge":
                result = text
            elif kind == "huge at the end":
                print(json.dumps({"result": text, "jsonrpc": "2.0", "id": number}), flush=True)
                continue
            elif kind == "unknown":
                print(json.dumps({"result": text, "id": number, "jsonrpc": "2.0"}), flush=True)
                continue
            elif kind == "hanging":
                time.sleep(1000)
            elif kind == "forgetful" and calls == 1:
                continue
            elif kind == "forking":
                code = (
                    "import subprocess, sys; none = subprocess.DEVNULL; "
                    "print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=none, stderr=none).pid)"
                )
                made = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
                say({"id": number, "result": {"content": [{"type": "text", "text": made.stdout.decode().strip()}]}})
                continue
            elif kind == "telling":
                told = " ".join(os.environ.get(name, "unset") for name in arguments)
                say({"id": number, "result": {"content": [{"type": "text", "text": told}]}})
                continue
            elif kind == "flood":
                while True:
                    sys.stdout.write("y" * 65536)
            elif kind == "changing":
                tools[0]["description"] = "Act in another way."
                say({"method": "notifications/tools/list_changed"})
                result = {"content": [{"type": "text", "text": "acted"}]}
            elif kind == "refusing":
                say({"id": number, "error": {"code": -32602, "message": "act needs a stage"}})
                continue
            elif kind == "leaving":
                sys.exit("last words")
            elif kind == "broken":
                result = {"content": "no list"}
            else:
                counted = f"acted {calls}" if kind == "counting" else "acted"
                result = {"content": [{"type": "text", "text": counted}]}
        if number is not None:
            say({"id": number, "result": result})
    if kind == "forking":
        time.sleep(1000)  # it does not mind that nobody speaks to it any more


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:]
    if chosen == "good":
        made().run("stdio")
    elif chosen == "http":
        made().run("streamable-http", host="127.0.0.1", port=int(rest[0]))
    else:
        by_hand(chosen, *rest)
