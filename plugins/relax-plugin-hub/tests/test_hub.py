# SPDX-License-Identifier: Apache-2.0
"""The upload of a model, by Hugging Face's own client to a small server on this machine that keeps what arrives."""

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from relax_plugin_hub.hub import account, check_account, push
from relax_plugin_hub.table import HubTable

from relax_core.api import ConfigError, InfrastructureError
from relax_core.api.checks import PreflightFacts
from relax_core.api.plan import Plan
from relax_core.testing.check import CheckSuite
from relax_core.testing.table import TableSuite

WRITES = {"name": "ada", "auth": {"accessToken": {"role": "write"}}}


class Hub(ThreadingHTTPServer):
    """The part of the Hub's API that an upload calls; `account` is the answer of whoami, None refuses the token."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.account, self.status = WRITES, 401
        self.created, self.stored, self.commits, self.tokens = [], {}, [], set()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/api/whoami-v2":
            self.answer(404, {"error": "absent"})
        elif self.server.account is None:
            self.answer(self.server.status, {"error": "refused"})
        else:
            self.answer(200, self.server.account)

    def do_PUT(self):
        self.server.stored[self.path.removeprefix("/stored/")] = self.body()
        self.answer(200, {})

    def do_POST(self):
        hub, path, body = self.server, self.path, self.body()
        hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            asked = json.loads(body)
            known = asked["name"] in [one["name"] for one in hub.created]
            hub.created.append(asked)
            self.answer(409 if known else 200, {"url": f"{hub.url}/{asked['organization']}/{asked['name']}"})
        elif path == "/api/models/ada/maths/preupload/main":
            large = {True: "lfs", False: "regular"}
            self.answer(200, {"files": [
                {"path": one["path"], "uploadMode": large[one["path"].endswith(".safetensors")], "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]})  # fmt: skip
        elif path == "/ada/maths.git/info/lfs/objects/batch":
            self.answer(200, {"transfer": "basic", "objects": [
                {**one, "actions": {"upload": {"href": f"{hub.url}/stored/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]})  # fmt: skip
        elif path == "/api/models/ada/maths/commit/main":
            hub.commits.append([json.loads(line) for line in body.splitlines()])
            self.answer(200, {"success": True, "commitUrl": f"{hub.url}/ada/maths/commit/1", "commitOid": "1" * 40})
        else:
            self.answer(404, {"error": "absent"})

    def body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status, document):
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["maths", "ada/maths/more", "ada/a b", ""])
def test_a_name_without_a_user_is_refused(name):
    with pytest.raises(ConfigError, match=r'--push-to: .*write "USER/NAME"'):
        check_account(name)


FACTS = PreflightFacts({"hub": {"push_to": "maths"}}, Plan("colocate", (), (), {}, ()), 1 << 30)


class TestTable(TableSuite):
    component = HubTable
    options = {"push_to": "ada/maths", "timeout_s": 60.0}


class TestAccount(CheckSuite):
    component = account
    facts = FACTS


def test_a_run_without_a_user_or_a_token_is_refused_before_it_starts(hub, monkeypatch):
    (found,) = account(FACTS)
    assert (found.state, found.field, found.found) == ("failed", "hub.push_to", "'maths'")
    facts = replace(FACTS, config={"hub": {"push_to": "ada/maths"}})
    assert [finding.state for finding in account(facts)] == ["ok"]
    assert list(account(replace(FACTS, config={}))) == []
    monkeypatch.delenv("HF_TOKEN")
    (found,) = account(facts)
    assert (found.state, found.found) == ("failed", "no token of the Hugging Face Hub")


def test_offline_is_refused(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="unset HF_HUB_OFFLINE"):
        check_account("ada/maths")


def test_a_missing_token_is_refused_and_one_of_the_login_accepted(hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"no token of the Hugging Face Hub; run `hf auth login`, or set HF_TOKEN"):
        check_account("ada/maths")
    (tmp_path / "token").write_text("hf_secret")
    check_account("ada/maths")


def test_a_token_that_is_refused_or_may_only_read_is_named(hub):
    hub.account = {"name": "ada", "auth": {"accessToken": {"role": "read"}}}
    with pytest.raises(ConfigError, match=r"a token of ada that may only read; run `hf auth login`"):
        check_account("ada/maths")
    hub.account = None
    with pytest.raises(ConfigError, match=r"a token that the Hub refuses .*nothing was exported") as refused:
        check_account("ada/maths")
    assert "hf_secret" not in str(refused.value)
    hub.status = 418
    with pytest.raises(InfrastructureError, match="the Hugging Face Hub failed"):
        check_account("ada/maths")


def test_a_hub_that_is_not_there_keeps_the_folder_and_says_how_to_send_it(hub, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(InfrastructureError, match=f"send it with `hf upload ada/maths {tmp_path}`"):
        push(tmp_path, "ada/maths", False, "Step 4")
    assert (tmp_path / "config.json").exists()


SEND = """
import sys
from pathlib import Path
from relax_plugin_hub.hub import check_account, push
check_account("ada/maths")
for step in (4, 8):
    print(push(Path(sys.argv[1]), "ada/maths", False, f"Step {step} of run"))
"""


@pytest.mark.process
def test_a_folder_arrives_whole_in_a_private_model_and_a_second_push_is_a_commit_more(hub, tmp_path):
    folder = tmp_path / "export"
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "model.safetensors").write_bytes(b"\x00\x01" * 5000)
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environ |= {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", SEND, str(folder)], env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.splitlines() == [f"{hub.url}/ada/maths"] * 2, done.stderr
    assert [one["name"] for one in hub.created] == ["maths", "maths"]
    assert hub.created[0]["organization"] == "ada" and hub.created[0]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_secret"}
    assert list(hub.stored.values()) == [b"\x00\x01" * 5000]
    assert len(hub.commits) == 2
    header, *files = hub.commits[0]
    assert header["value"]["summary"] == "Step 4 of run"
    sent = {one["value"]["path"]: base64.b64decode(one["value"].get("content", "")) for one in files}
    assert sent == {
        "config.json": b'{"model_type": "tiny"}', "adapter/adapter_config.json": b"{}", "model.safetensors": b"",
    }  # fmt: skip
