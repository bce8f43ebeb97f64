# SPDX-License-Identifier: Apache-2.0
"""The verbs for models and steps of a run: evaluate, compare, sample, export a checkpoint, and repeat a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from relax_core.cli.terminal import AsJson, print_json, print_table, say, split

if TYPE_CHECKING:
    from relax_plugin_workbench.compare import SetComparison
    from relax_plugin_workbench.eval_result import EvalResult
    from relax_plugin_workbench.replay import Replay


def eval_(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A Hugging Face folder, a checkpoint, a run, or RUN@STEP.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES...] [KEY=VALUE]...", help="TOML files with [[eval.sets]], then overrides."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result; it must be new or empty. Default: a new one in ./evals.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Also compare with this target, or with the folder of an earlier result.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Evaluate a model on the sets of `[eval]` with the policy's engines, and keep rewards and samples in a folder.

    A run's own configuration is the first layer. Its sets are evaluated with the seeds of its own evaluations, so the
    results can be compared by task. The run directory is only read. The engines run on this machine.
    """
    from relax_plugin_workbench.evaluate import evaluate_against

    result, comparisons = evaluate_against(target, *split(arguments or []), against, out)
    for notice in result.notices:
        say(notice, err=True)
    if json:
        document = {"schema": "relax.eval/1", **result.document(), "directory": str(result.directory)}
        compared = {"against": against, "comparison": [asdict(each) for each in comparisons]} if against else {}
        print_json({**document, **compared})
        return
    _print_result(result)
    if comparisons:
        say(f"\n{result.target} (second) against {against} (first)")
        _print_comparison(comparisons)
    say(f"result: {result.directory}")


def _print_result(result: EvalResult) -> None:
    best = sorted({name for record in result.sets for name in record["metrics"] if name.startswith("best_of_")},
                  key=lambda name: int(name.removeprefix("best_of_")))  # fmt: skip
    rows = []
    for record in result.sets:
        metrics = record["metrics"]
        rows.append((
            record["set"], str(len(record["tasks"])), str(record["count"]), f"{record['mean']:.3f}",
            f"{metrics['standard_error']:.3f}", *(f"{metrics[k]:.3f}" if k in metrics else "-" for k in best),
            f"{metrics['failed']:.0f}",
        ))  # fmt: skip
    head = ("set", "tasks", "samples", "mean", "error", *(name.replace("_", " ") for name in best), "failed")
    print_table(head, rows)


def rollout(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FILES... [KEY=VALUE]...", help="TOML files, then overrides.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the samples: new, empty, or of the same configuration.")],
    tasks: Annotated[
        int, typer.Option("--tasks", "-n", min=1, help="Number of tasks that the folder is to have.")
    ] = 100,
    file_format: Annotated[
        Literal["jsonl", "parquet"], typer.Option("--format", help="Parquet: also a table of all samples at the end.")
    ] = "jsonl",
    json: AsJson = False,
) -> None:
    """Sample and score tasks without training, and keep all samples in a folder.

    Each task gets `rollout.group_size` samples. The same command continues a folder after a kill; a larger number of
    tasks extends the folder. `relax train` with `algorithm=sft` trains on the samples.
    """
    from relax_plugin_workbench.rollout import rollout as sample

    result = sample(*split(arguments), tasks, out, file_format)
    if json:
        paths = {"directory": str(result.directory), "file": str(result.file)}
        print_json({"schema": "relax.rollout/1", **asdict(result), **paths})
        return
    mean = "no sample judged" if result.mean is None else f"mean reward {result.mean:.3f}"
    samples = result.judged + result.failed
    say(f"{result.tasks} tasks ({result.added} new), {samples} samples, {result.failed} failed, {mean}")
    say(f"samples: {result.file}")


def compare(
    first: Annotated[
        str,
        typer.Argument(metavar="RUN[@STEP]", help="A run, with the step of an evaluation; or a result of relax eval."),
    ],
    second: Annotated[
        str | None, typer.Argument(metavar="RUN[@STEP]", help="The evaluation to compare; default: the first of RUN.")
    ] = None,
    set_name: Annotated[str, typer.Option("--set", help="Compare only this evaluation set.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    json: AsJson = False,
) -> None:
    """Compare two evaluations on the same tasks: the paired difference with its error and interval.

    Without a step, the last evaluation of a run counts. With one argument, the first evaluation of the run is compared
    with its last evaluation, or with that of STEP.
    """
    from relax_plugin_workbench.compare import compare

    comparisons = compare(first, second, set_name, seed)
    if json:
        print_json({"schema": "relax.compare/1", "first": first if second else f"{first}, first evaluation",
                    "second": second or first, "seed": seed, "sets": [asdict(each) for each in comparisons]})  # fmt: skip
    else:
        _print_comparison(comparisons)


def export(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run directory, or a name under ./runs; default: latest.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes of the run's configuration, such as trainer.device=cpu.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write the model to; it must be new or empty.")] = Path("export"),
    step: Annotated[
        int | None, typer.Option(help="Export the checkpoint of this step; default: the newest complete checkpoint.")
    ] = None,
    push_to: Annotated[
        str,
        typer.Option("--push-to", help="Model of the Hugging Face Hub, USER/NAME, to which the folder is also sent."),
    ] = "",
    public: Annotated[
        bool, typer.Option("--public", help="With --push-to: make a new model public; default: private.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, with the run's tokenizer and chat template.

    Adapters are folded in, and are also in the folder `adapter`. The run directory is only read. With --push-to, the
    account of `hf auth login` or HF_TOKEN sends the folder as one commit.
    """
    from relax_plugin_workbench.export import export as write

    written = write(run, out, step, overrides or (), push_to, public)
    for notice in written.notices:
        say(notice, err=True)
    if json:
        print_json({"schema": "relax.export/1", "checkpoint": str(written.checkpoint), "step": written.step,
                    "directory": str(written.directory), "url": written.url})  # fmt: skip
    else:
        say(f"model of step {written.step}: {written.directory}")
        if written.url:
            say(f"sent to {written.url}")


convert = typer.Typer(no_args_is_help=True)


@convert.callback()
def convert_models() -> None:
    """Convert model folders."""


@convert.command("fold-lora")
def fold_lora(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Hugging Face folder of the model without adapters.")],
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Folder of adapters in peft's format, such as RUN/export/adapter.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model to; it must be new or empty.")] = Path("folded"),
    json: AsJson = False,
) -> None:
    """Write a model with LoRA adapters folded into its weights, as a Hugging Face folder.

    Weights keep the number format of the base and are rounded once. The other files of the base are copied.
    """
    from relax_plugin_workbench.fold import fold_lora as fold

    written = fold(base, adapter, out)
    if json:
        print_json({"schema": "relax.fold-lora/1", "directory": str(written.directory), "changed": written.changed,
                    "tensors": written.tensors})  # fmt: skip
    else:
        say(f"folded into {written.changed} of {written.tensors} tensors: {written.directory}")


def _print_comparison(comparisons: Sequence[SetComparison]) -> None:
    head = ("set", "steps", "tasks", "first", "second", "difference", "error", "95 % interval", "better", "worse")
    rows = []
    for each in comparisons:
        paired = each.paired
        rows.append((
            each.set_name, f"{each.first_step}, {each.second_step}", str(paired.tasks), f"{paired.first:.3f}",
            f"{paired.second:.3f}", f"{paired.difference:+.3f}", f"{paired.standard_error:.3f}",
            f"{paired.low:+.3f} to {paired.high:+.3f}", str(paired.better), str(paired.worse),
        ))  # fmt: skip
    print_table(head, rows)
    for each in comparisons:
        if left_out := each.paired.left_out:
            say(f"{each.set_name}: {left_out} tasks are judged in only one evaluation and left out", err=True)
        first, second = each.temperatures
        if first != second:
            say(f"{each.set_name}: temperatures differ ({first:g}, {second:g})", err=True)


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a name under ./runs.")],
    step: Annotated[int, typer.Option(min=1, help="The step to train again.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes of the run's configuration, such as algorithm.clip_high=0.3.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder that keeps the copy of the run; default: the copy is deleted.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Train a recorded step of a run again, and compare its metrics, samples and weights with the record.

    A copy of the run continues from the newest checkpoint before the step, on this machine. The run directory is only
    read. A deterministic run must give the same bits: if it does not, the exit code is 1.
    """
    from relax_plugin_workbench.replay import replay as repeat

    repeated = repeat(run, step, overrides or [], out)
    if json:
        document = asdict(repeated)
        document |= {"metrics": [metric._asdict() for metric in repeated.metrics],
                     "directory": None if repeated.directory is None else str(repeated.directory)}  # fmt: skip
        print_json({"schema": "relax.replay/1", **document, "identical": repeated.identical})
    else:
        _print_replay(repeated)
    if not repeated.identical and repeated.deterministic and not repeated.changes:
        raise typer.Exit(1)


def _print_replay(replayed: Replay) -> None:
    start = f"the checkpoint of step {replayed.start}" if replayed.start else "the start of the run"
    changes = f": {' '.join(replayed.changes)}" if replayed.changes else ""
    say(f"step {replayed.step} of {replayed.run}, replayed from {start}{changes}")
    rows = [
        (key, *("-" if value is None else repr(value) for value in values)) for key, *values in replayed.changed_metrics
    ]
    if rows:
        print_table(("metric", "recorded", "replayed"), rows)
    say(f"metrics: {len(replayed.metrics)} compared, {len(rows)} differ")
    changed = replayed.changed_samples
    say(
        f"samples: {replayed.num_samples} compared, {len(changed)} differ{': ' * bool(changed)}{', '.join(changed[:8])}"
    )
    states = {True: "equal", False: "differ", None: f"not compared, the run has no checkpoint of step {replayed.step}"}
    say(f"weights: {states[replayed.weights]}")
    if replayed.directory is not None:
        say(f"copy: {replayed.directory}")
    if not replayed.identical and not replayed.deterministic and not replayed.changes:
        say("the run was not deterministic; train with deterministic=true for steps that repeat bit for bit")
