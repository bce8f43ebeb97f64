# SPDX-License-Identifier: Apache-2.0
"""Sinks: the quickstart's step with all sinks of this repository at once, over its step without them, in one run.

The sinks work in every other block of steps (`gated_sinks.py`). What the recorder itself does because a run has sinks, such
as removing secrets from transcripts, is in all steps. No service is contacted: Weights & Biases and SwanLab write files, MLflow
and Trackio databases, ClearML a session, and the collector of OpenTelemetry is a server of this process that reads and forgets.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.gated_sinks import BLOCK, works
from tests.benchmarks.runs import HERE, built, trained

RUN_S = 900.0
INSTALLED: Mapping[str, str] = {
    "tensorboard": "", "prometheus": "", "opentelemetry": ', endpoint = "{collector}"', "wandb": ', mode = "offline"',
}  # fmt: skip
"""Options of the sinks whose packages are in the environment, by name."""
OTHERS: Mapping[str, str] = {
    "mlflow": "", "trackio": "", "swanlab": ', mode = "offline"', "clearml": "",
}  # fmt: skip
"""Options of the sinks whose packages are in an environment of their own (`scripts/clients sinks`), by name."""


class _Forgets(BaseHTTPRequestHandler):
    """A collector that takes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """Serve a collector; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Forgets)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def seconds(records: Sequence[Mapping[str, Any]]) -> dict[bool, list[float]]:
    """Return the times of steps by whether sinks worked. The first block and the first step of each block don't count."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for record in records:
        step = int(record["step"])
        if "time/step_s" in record and step > BLOCK and (step - 1) % BLOCK:
            found[works(step)].append(float(record["time/step_s"]))
    return found


def one(recipe: Path, sinks: Mapping[str, str], blocks: int, address: str) -> report.Row:
    """Train one run with these sinks; return its median steps with and without them."""
    report.say(f"sinks: {', '.join(sinks)}")
    tables = ", ".join(f'{{name = "gated-{name}"{more.format(collector=address)}}}' for name, more in sinks.items())
    settings = [
        f"steps={BLOCK * (1 + 2 * blocks)}", f'plugins=["{HERE / "gated_sinks.py"}"]', f"sinks=[{tables}]",
        "eval.every=0", "eval.at_start=false", "checkpoint.every=1000000",
    ]  # fmt: skip
    records, summary = trained(recipe, settings, RUN_S)
    if failures := summary["callback_failures"]:
        why = "a sink whose call takes 2 minutes is off, as on a machine in use"
        raise RuntimeError(f"calls of sinks failed: {json.dumps(failures)}; {why}")
    found = seconds(records)
    with_sinks, without = statistics.median(found[True]), statistics.median(found[False])
    return {
        "sinks": " ".join(sinks), "steps": len(found[True]), "step without s": without, "step with s": with_sinks,
        "ratio": with_sinks / without,
    }  # fmt: skip


def with_their_packages() -> None:
    """Let the runs of this process find the packages of all sinks, after those are installed in the user's cache."""
    script = HERE.parents[1] / "scripts" / "clients"
    made = subprocess.run([script, "sinks"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    (packages,) = Path(made).parents[1].glob("lib/python*/site-packages")
    os.environ["PYTHONPATH"] = str(packages)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--sinks", nargs="+", choices=(*INSTALLED, *OTHERS), default=[*INSTALLED, *OTHERS])
    parser.add_argument("--each", action="store_true", help="also each sink alone")
    parser.add_argument("--blocks", type=int, default=5, help=f"of {BLOCK} steps with sinks, and as many without")
    parser.add_argument("--recipe", type=Path, help="of a built quickstart; else one is built, which takes a minute")
    options = parser.parse_args()
    set_up = report.begin(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not OTHERS.keys().isdisjoint(options.sinks):
        with_their_packages()
    sinks = {name: {**INSTALLED, **OTHERS}[name] for name in options.sinks}
    groups = [sinks, *([{name: more} for name, more in sinks.items()] if options.each else [])]
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as folder, collector() as address:
        os.environ["TRACKIO_DIR"] = str(Path(folder) / "trackio")
        recipe = options.recipe or built(Path(folder) / "recipe", 0)
        rows = [one(recipe, group, options.blocks, address) for _ in range(options.repeats) for group in groups]
    report.finish("sinks", set_up, rows, options)
