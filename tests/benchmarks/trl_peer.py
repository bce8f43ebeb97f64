# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer on a quickstart's model and tasks: the peer of `trl.py`, run by an interpreter that has trl and datasets.

It imports nothing of Relax, patches nothing of TRL and asks for what the recipe asks for. Prints one JSON line: when each
step ended, its reward and its CPU seconds, and the held-out share of right answers at some steps; evaluations cost no time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

EVAL_BATCH = 256
BETAS = (0.9, 0.99)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the built quickstart: model, train.jsonl, eval.jsonl")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the recipe's TOML says, in TRL's words: on-policy, one update a step, no KL, dapo's mean over tokens."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-peer-"), "max_steps": options.steps, "learning_rate": options.lr,
        "lr_scheduler_type": "linear", "warmup_steps": 10, "weight_decay": 0.0, "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1], "max_grad_norm": 1.0, "per_device_train_batch_size": 256, "num_generations": 8,
        "max_completion_length": 8, "temperature": 1.0, "beta": 0.0, "epsilon": 0.2, "loss_type": "dapo",
        "scale_rewards": "group", "use_cpu": True, "bf16": options.dtype == "bfloat16", "fp16": False,
        "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "seed": options.seed, "dataloader_num_workers": 0, "dataloader_pin_memory": False,
    }  # fmt: skip


def held_out(model: Any, tokenizer: Any, tasks: list[dict[str, str]]) -> float:
    """Share of sampled answers that are right; leaves the random state as it was."""
    import torch

    state, was = torch.get_rng_state(), model.training
    torch.manual_seed(1234)
    model.eval()
    right = 0
    for at in range(0, len(tasks), EVAL_BATCH):
        part = tasks[at : at + EVAL_BATCH]
        prompts = tokenizer(
            [task["prompt"] for task in part], return_tensors="pt", padding=True, padding_side="left",
            return_token_type_ids=False,
        )  # fmt: skip
        with torch.no_grad():
            made = model.generate(**prompts, max_new_tokens=8, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        for task, row in zip(part, made[:, prompts["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in row
            right += ended and tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) == task["answer"]
    model.train(was)
    torch.set_rng_state(state)
    return right / len(tasks)


def main() -> None:
    options = arguments()
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    torch.set_num_threads(options.threads)
    train, tasks = (read(options.folder / name) for name in ("train.jsonl", "eval.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.float32)
    steps: list[dict[str, float]] = []
    evals = [(0, held_out(model, tokenizer, tasks))] if options.eval_every else []

    class Watch(TrainerCallback):  # type: ignore[misc]
        paused = paused_cpu = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.began_cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now, cpu = time.perf_counter(), time.process_time()
            steps.append({
                "step": state.global_step, "elapsed_s": now - self.began - self.paused,
                "cpu_s": cpu - self.began_cpu - self.paused_cpu,
            })  # fmt: skip
            if options.eval_every and state.global_step % options.eval_every == 0:
                evals.append((state.global_step, held_out(model, tokenizer, tasks)))
                self.paused += time.perf_counter() - now
                self.paused_cpu += time.process_time() - cpu

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs and steps:
                steps[-1]["reward"] = float(logs["reward"])

    def exact(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        triples = zip(completions, completion_ids, answer, strict=True)
        return [float(ids[-1] == tokenizer.eos_token_id and text == right) for text, ids, right in triples]

    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=exact, args=trl.GRPOConfig(**settings(options)), processing_class=tokenizer,
        train_dataset=Dataset.from_list(train), callbacks=[Watch()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    found = {"steps": steps, "evals": evals, "peak_mb": peak_mb, "trl": trl.__version__, "torch": torch.__version__}
    print(json.dumps(found))


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
