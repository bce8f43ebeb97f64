# SPDX-License-Identifier: Apache-2.0
"""Messages to people arrive, and a failure to send is only logged."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from relax_core.api.errors import InfrastructureError
from relax_core.api.events import RoleFailed, RunFinished
from relax_core.observe.observers import Notifier
from relax_core.observe.recorder import Recorder


@pytest.fixture
def inbox():
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.received = received
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_finished_run_and_a_failed_role_are_told(inbox):
    notifier = Notifier([f"json://127.0.0.1:{inbox.server_port}/"], "maths")
    notifier.relax_role_failed(RoleFailed("actor", "out of memory", 1, True))
    notifier.relax_run_finished(
        RunFinished("finished", {"steps": 30, "wall_seconds": 61.2, "reward_first": 0.3, "reward_last": 0.8})
    )
    assert [(message["title"], message["message"]) for message in inbox.received] == [
        ("maths: actor failed", "out of memory"),
        ("maths finished", "30 steps, 61 s, reward 0.300 to 0.800"),
    ]


def test_a_url_that_is_not_understood_is_an_error_without_the_url(caplog):
    with pytest.raises(InfrastructureError, match="1 of 1 are not understood") as caught:
        Notifier(["nosuchservice://secret-token"], "maths").relax_run_finished(RunFinished("failed", {}))
    assert "secret-token" not in str(caught.value) + caplog.text


def test_a_message_that_cannot_be_sent_does_not_hurt_the_run(run_dir, clock):
    recorder = Recorder(run_dir, observers={"notify": Notifier(["nosuchservice://secret-token"], "maths")}, clock=clock)
    recorder.write(RunFinished("finished", {}))
    recorder.close()
    log = (run_dir.logs / "controller.jsonl").read_text()
    assert "are not understood" in log and "secret-token" not in log
    assert run_dir.read("summary")["status"] == "finished"


def test_apprise_is_imported_only_to_send():
    import subprocess

    script = "import sys, relax_core.observe.observers; sys.exit('apprise' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
