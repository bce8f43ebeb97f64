# SPDX-License-Identifier: Apache-2.0
"""The command `relax` with all of its verbs.

Each verb is a function in a module of this package and imports heavy modules only when it runs.
"""

from __future__ import annotations

import signal
import sys
import threading
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from relax_core.cli import bench, config, data, engine, logs, models, plan, plugins, runs, samples, scale
from relax_core.cli.terminal import INTERRUPTED, STOPPING, Interrupted, fail, say, stop_command
from relax_core.observe.console import EVERY_S, INTERRUPTS, Interrupts, print_waits

app = typer.Typer(
    name="relax",
    help="Reinforcement-learning post-training of language and omni-modal models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(runs.train)
app.command("resume")(runs.resume)
app.command("attach")(runs.attach)
app.command("stop")(runs.stop)
app.command("checkpoint")(runs.checkpoint)
app.command("evaluate")(runs.evaluate)
app.command("profile")(runs.profile)
app.command("pause")(runs.pause)
app.command("continue")(runs.continue_)
app.command("try", cls=plan.WithCommand)(plan.try_)
app.command("graph")(plan.graph)
app.command("plan")(plan.plan)
app.command("doctor", help="Check the machine, the installation and a configuration.")(plan.doctor)
app.command("init")(config.init)
app.command("new")(plugins.new)
app.command("runs", help="List runs: state, steps, reward.")(runs.runs)
app.command("status", help="Show a run's progress and its live roles.")(runs.status)
app.command("why", help="Show what a run waits for, and which role must act.")(runs.why)
app.command("samples")(samples.samples)
app.command("engines")(runs.engines)
app.command("logs")(logs.logs)
app.command("scale")(scale.scale)
app.command("serve")(runs.serve)
app.command("compare")(models.compare)
app.command("eval")(models.eval_)
app.command("rollout")(models.rollout)
app.command("export")(models.export)
app.command("replay")(models.replay)
app.command("bundle")(runs.bundle)
app.command("report", help="Rewrite a run's report and print its path.")(runs.report)
app.add_typer(bench.verbs, name="bench")
app.add_typer(config.verbs, name="config")
app.add_typer(models.convert, name="convert")
app.add_typer(data.verbs, name="data")
app.add_typer(engine.verbs, name="engine")
app.add_typer(plugins.verbs, name="plugins")


def _print_version(asked: bool) -> None:
    if asked:
        say(f"relax {metadata.version('relax-core')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Run a verb and exit; print any error as one line on stderr and exit with its code."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # `nohup` ignores SIGHUP
            signal.signal(number, stop_command)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # a live run saves a checkpoint; it must never end the process
    INTERRUPTS.set(interrupts := Interrupts())
    ended = threading.Event()
    threading.Thread(target=_print_waits_until, args=(ended,), daemon=True).start()
    try:
        if sys.argv[1:3] == ["plugins", "list"]:
            # Typer imports pydantic to convert values, which takes longer than this whole verb.
            code = plugins.list_without_typer(sys.argv[3:])
        else:
            code = int(app(standalone_mode=False, prog_name="relax") or 0)
    except (Exception, KeyboardInterrupt) as error:
        code = fail(Interrupted() if interrupts.sent else error)
    else:
        code = fail(Interrupted()) if interrupts.sent and code == INTERRUPTED else code  # typer turns it into a code
    finally:
        ended.set()
    sys.exit(code)


def _print_waits_until(ended: threading.Event) -> None:
    while not ended.wait(EVERY_S):
        print_waits()
