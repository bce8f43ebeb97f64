# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the site that are made from the code: configuration, metrics, command line, kinds, algorithms, recipes.

`python docs/generate.py` writes them, `--check` says which committed page is not what the code says now.
Only the plugins of this repository are described, whatever else is installed.
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
MADE = "<!-- Made by docs/generate.py from the code; edit that. -->\n\n"


def configuration() -> str:
    from relax_core.config.documentation import reference
    from relax_core.registry.catalogue import Catalogue

    return reference(Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)}))


def metrics() -> str:
    from relax_core.observe.metrics import reference

    return reference()


def kinds() -> str:
    """The table of kinds, and what is in the box of each."""
    from relax_core.api.component import KINDS
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)})
    lines = ["# Kinds", "", _KINDS, "", "| kind | hook | base class | table | in the box | `relax new` |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in KINDS.values():
        table = f"`[[{kind.table}]]`" if kind.many else f"`[{kind.table}]`" if kind.table else ""
        names = ", ".join(f"`{name}`" for name in catalogue.names(kind.name))
        base = kind.base.rpartition(":")[2]
        lines.append(
            f"| {kind.name} | `{kind.hook}` | `{base}` | {table} | {names} | {'yes' if kind.template else ''} |"
        )
    return "\n".join(lines) + "\n"


def algorithms() -> str:
    """Every algorithm of the box from its own file: its equations, what it reads and its defaults; then the parts."""
    from relax_core.registry.catalogue import Catalogue

    catalogue = Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)})
    names = catalogue.names("algorithm")
    lines = [
        "# Algorithms",
        "",
        _ALGORITHMS,
        "",
        "| name | paper | statistics of | divides by | reads |",
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
    """What each recipe is, and what `tests.benchmarks recipes` recorded of it."""
    from importlib import import_module

    from relax_core.control.prepare import known_recipes as known

    found = {row["recipe"]: row for row in json.loads(RECIPES.read_text(encoding="utf-8"))["rows"]}
    lines = [
        "# Recipes",
        "",
        _RECIPES,
        "",
        "| recipe | held-out before, by seed | after | change | in standard errors |",
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
    """What `tests.benchmarks learning` recorded, and of which algorithms it did not."""
    if not LEARNED.is_file():
        return
    found = json.loads(LEARNED.read_text(encoding="utf-8"))
    yield from ("", "## What they learn", "", _LEARNING, "")
    yield from (
        "| name | measure | before | after, by seed | change | in standard errors | along the run | setting |",
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
        yield from ("", f"Not recorded yet: {', '.join(f'`{name}`' for name in missing)}.")


def _gradients() -> Iterator[str]:
    """What `tests.golden.gradients` recorded and its test holds."""
    found = json.loads(GRADIENTS.read_text(encoding="utf-8"))
    yield from ("", "## Their gradients beside GRPO's", "", _BESIDE, "")
    yield from ("| name | cosine | difference | cosine, all ratios 1 | difference |", "|---|---|---|---|---|")
    for name, told in sorted(found.items()):
        cells = (f"{told[key][value]:.3f}" for key in ("off_policy", "on_policy") for value in ("cosine", "difference"))
        yield f"| `{name}` | {' | '.join(cells)} |"


def _algorithm(name: str, target: Any) -> Iterator[str]:
    """Its file's own words, and the options in which it differs from the family."""
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
        yield from ("", "| option | default | |", "|---|---|---|")
    for key, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if key in chosen:
            yield f"| `{key}` | `{json.dumps(default)}` | {' '.join((field.description or '').split())} |"


def _indented(text: str) -> Iterator[str]:
    """Equations are set off by four spaces, which Markdown takes for code."""
    for line in text.splitlines():
        yield line if line.startswith("    ") else line.strip()


def _family() -> Iterator[str]:
    from relax_core.learn.policy_gradient import ClippedOptions, PolicyGradientOptions

    yield from ("", "## Options of the family", "", PolicyGradientOptions.__doc__ or "")
    yield from _options(PolicyGradientOptions, set(PolicyGradientOptions.model_fields))
    yield from ("", "Algorithms that clip the ratio have these as well:")
    yield from _options(ClippedOptions, set(ClippedOptions.model_fields) - set(PolicyGradientOptions.model_fields))
    yield from ("", _OWN_ADVANTAGES)


def _parts() -> Iterator[str]:
    """What `relax_core.learn` offers to an algorithm, by the first sentence of each."""
    from relax_core import learn

    yield from ("", "## Parts", "", _PARTS, "", "| part | |", "|---|---|")
    stub = ast.parse((Path(learn.__file__).parent / "__init__.pyi").read_text(encoding="utf-8"))
    names = {one.module: [each.name for each in one.names] for one in stub.body if isinstance(one, ast.ImportFrom)}
    for module in ("advantages", "off_policy", "losses", "counts"):
        for name in filter(str.islower, names[module]):
            text = " ".join((getattr(learn, name).__doc__ or "").split()).replace("|", "\\|")
            yield f"| `learn.{name}` | {text} |"


def command_line() -> str:
    """Every verb with its arguments and options, as the parser has them."""
    from relax_core.cli.main import app

    return "\n".join(["# Command line", "", _COMMANDS, *_verbs(typer.main.get_command(app), "relax")]) + "\n"


def _verbs(command: Any, path: str) -> Iterator[str]:
    for name in sorted(getattr(command, "commands", {})):
        verb = command.commands[name]
        yield from ("", f"{'##' if path == 'relax' else '###'} `{path} {name}`", "", verb.help or "")
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
_BESIDE = """\
Of one batch in float64, each by its own defaults: the cosine between the gradient (by the log-probs of the rows' tokens) and
GRPO's, and the length of their difference, GRPO's being 1. Groups of four have rewards of several levels, one sample two
rows, another no verdict; the policy has moved from what sampled by about a half in each log-prob. Beside it the same with
all ratios 1, as in a first update on-policy. There `gspo` and `sapo` have to be GRPO: they share its advantages and its mean,
and differ in what they do with a ratio. For the same reason `dapo`, `dppo` and `m2po` are one there, a mean over tokens.
`sft` is taught the same rows, `dpo` the best and the worst sample of a group; a `reward-model` trains another output.
`python -m tests.golden.gradients` records it, and a test holds it."""
_ALGORITHMS = """\
Figures in the text below are of a quickstart model with heads of 16; the table's are of the recipe's own, with heads of 32.
Each is one file, most of them of `relax-plugin-policy-gradient`, to be read beside its paper; what follows is those files'
own words.
They share [options](#options-of-the-family); a table below shows only what an
algorithm adds or sets otherwise. Every one is tested against plain loops over numbers and an example worked by hand
(`tests/golden`).

**Corrections.** A token may have been sampled by older weights, or by an engine that rounds otherwise. By default the ratio
is taken to the policy that sampled (`correction = "behaviour"`), so that the clip bounds the lag too. `"truncate"` leaves the
ratio to the policy that starts the step and weighs a token by `min(w, 2)`, w that policy over the one that sampled (truncated
importance sampling within the decoupled objective); without lag w is 1 apart from rounding. `"mask"` drops what lies outside
a band (IcePop with 0.5 and 5), `"reject"` does so and weighs nothing, and `"none"` does nothing. Algorithms without a ratio
truncate by default. With `top_p` below 1 an engine's log-probs are of the
distribution it drew from, so w corrects for that as well, as far as a token could be drawn at all. The metrics
`policy/importance_weight`, `..._max` and `policy/importance_clipped` show what it does; [benchmarks](benchmarks.md) have what
it is worth.

**A critic.** `ppo` trains a second model on the rows of the first (`[critic]`, `[placement.critic]`);
`critic.warmup_steps` lets it learn alone first. With `model.lora` it trains adapters as the policy does. On the quickstart's
task, `relax train quickstart algorithm=ppo run.runner=local steps=150` raised the held-out reward from 0.285 to 0.621 (512
answers, one seed), the critic starting from the policy's weights with a head of zeros.

**A greedy answer.** `remax` has one more sample of each task drawn at temperature 0, beside the `rollout.group_size`
others; it is judged and counted, and never trained. `reward/greedy` is its mean reward.

**A teacher.** `distillation` learns from another model (`[[teachers]]`, `[placement.teacher]`) what it thinks of the
policy's own samples. Of a sampled token it is credit in a policy gradient (`mode = "advantage"`); over the likeliest tokens
of either model it is the loss (`mode = "loss"`). Rewards are not needed; `reward_coef` mixes them in. Several teachers have
disjoint tasks, `only = "domain=maths"`, and every task exactly one: others are refused at start with their line, as is a
teacher whose vocabulary or tokenizer is not the policy's. A teacher is a folder that a trainer runs forward, or, for the
sampled tokens alone, [a pool of engines](engines.md#pools-beside-the-policys) (`engine = "POOL"`), on devices of its own. All
log-probs are of logits / `rollout.temperature`. `distill/kl` and `distill/agreement` show how near they are. On the
quickstart's task, whose recipe trains a teacher to 80 % of right answers,
`relax train quickstart algorithm=distillation run.runner=local steps=100` brought `distill/kl` from 0.63 (mean of the first ten
steps) to 0.15 (of the last ten), the agreement from 0.79 to 0.91 and the held-out reward, which it never saw, from 0.285 to
0.551 (512 answers, one seed, placement `async` with staleness 0).

**Given answers.** `sft`, `dpo` and `reward-model` (`relax-plugin-supervised`) learn from [rows that somebody wrote](data.md):
no rollout, no credit. On the quickstart's task, whose recipe writes completions and pairs beside its answers, 15 steps at
`optimizer.lr=1e-3` took the held-out loss of `sft` from 0.363 to 0.294, the held-out margin of `dpo` from 0 to 0.68 (98 %
of 512 pairs in order) and that of `reward-model` from 0 to 0.65 (93 %), on one seed. DPO's losses and IPO's are TRL's on the
same tensors, as are SFT's and the reward model's; IPO takes means over completions, as there. TRL's `sigmoid` knows no
label smoothing, ours is the conservative one of the DPO authors.

**A look at the whole step.** `m2po` chooses the tokens that it trusts from all rows of a step before the first update
(`Algorithm.prepare`), so a step waits for all of its rows and for their log-probs at its start."""
_LEARNING = """\
The quickstart's task, 100 steps of 16 x 8 samples (of 16 rows or pairs, where somebody wrote them) by each algorithm's own
defaults and the recipe's learning rate, over three seeds, each with a model, tasks and held-out tasks of its own; `setting`
says what else was set. Reward: the right answers on 512 held-out tasks, 4 samples each. KL to the recipe's teacher: of the
policy's own samples, means of the first and the last ten steps. Changes are means over the seeds, and by their standard errors,
positive where it got better: more than 3 counts as learnt. Along the run: the reward in training, the lowest mark 0 and the
highest 1; else the loss, the KL or the margin, the highest mark the highest of the run. It does not say which is best: the task
is tiny, and on-policy with one update a step the ratio is 1, so that GRPO and GSPO have one gradient.
`python -m tests.benchmarks learning NAMES` makes it."""
_RECIPES = """\
A recipe makes its own model and data from a seed, and trains on them: `relax train NAME` starts it, overrides follow as for any
file. Those that see and hear need `pip install relax-plugin-omni`, `calculator`, `search` and `reasoning` their plugins
(`relax-plugin-mcp`, `relax-plugin-search`, `relax-plugin-reasoning-gym`), `code` and `repair` a [sandbox](security.md), and
`repair` `relax-plugin-agents`. Their first stage is a supervised warm start that ends where most is still to be learnt, the
second is reinforcement; the table and the curves are of reinforcement alone, over three seeds, each with a model, tasks and
held-out tasks of its own: 256, of `code` and `repair` 128, one sample each at temperature 1; `signalling` has no other meanings
than the eight that it is trained on, 32 samples of each. Changes are means over the seeds, and by their standard errors.
`python -m tests.benchmarks recipes NAMES` makes it; how long each took is
in [the benchmarks](benchmarks.md#recipes)."""
_OWN_ADVANTAGES = """A function in place of an algorithm's credit is a file beside the configuration that names it:

    # mine.py                        algorithm = { name = "grpo", advantages = "mine.py:by_turn" }
    from relax_core import learn

    def by_turn(groups):
        earned = groups.step_rewards - groups.step_rewards.nanmean(dim=(1, 2), keepdim=True)
        return learn.of_turns(earned, groups)

It is given one or several whole groups, and must credit each by itself: how many come together is the run's matter. A sample
that is not valid gets nothing, whatever the function says. `ppo` and `reinforce-plus-plus` are their way to credit, and take
none. The loss stays the algorithm's; one with a loss of its own is a component, `relax new algorithm`."""
_PARTS = """\
`from relax_core import learn`: what algorithms are made of, for your own as well. `learn.PolicyGradient` is the family's base:
an algorithm adds `credit` and `surrogate`."""
_KINDS = """\
What can vary. A plugin offers components of these kinds through the hook; a configuration chooses one by its name in the
table. The kinds are one table in `relax_core/api/component.py`; this page, `relax plugins`, `relax new` and the schema are made
from it."""
_COMMANDS = """\
Results go to stdout, progress and logs to stderr; with `--json` exactly one JSON document is on stdout, also of a
verb that fails: `{"error": ..., "type": ..., "exit_code": ...}`, and `field`, `got`, `fix` where the configuration
is wrong. A run that is named may be a directory, a name under the runs folder, or the
start of one. [Exit codes](runs.md#exit-codes)."""
PAGES = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "cli.md": command_line,
    "kinds.md": kinds,
    "algorithms.md": algorithms,
    "recipes.md": recipes,
}


def main(check: bool) -> int:
    """Write all pages, or name those that differ; the number of these."""
    stale = 0
    for name, make in PAGES.items():
        page, path = MADE + make(), DOCS / name
        have = path.read_text(encoding="utf-8") if path.is_file() else ""
        if check and have != page:
            stale += 1
            print(f"docs/{name} is not what the code says; run: python docs/generate.py")
            print(
                *difflib.unified_diff(have.splitlines(), page.splitlines(), name, "the code", n=0, lineterm=""),
                sep="\n",
            )
        elif not check:
            path.write_text(page, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
