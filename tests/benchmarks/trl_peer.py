# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer on a recipe's model and tasks: the peer of `trl.py`, run by an interpreter that has trl and datasets.

It imports nothing of Relax and changes nothing of TRL; `--settings` and `--lora` are the recipe's settings in TRL's words. It
prints one JSON line: when each step ended, its reward and its processor seconds, and the held-out share of right answers at
some steps. Evaluations cost no time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

EVAL_BATCH = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the built recipe: model, train.jsonl, eval.jsonl")
    parser.add_argument("--settings", type=json.loads, required=True, help="of GRPOConfig, as JSON")
    parser.add_argument(
        "--lora", type=json.loads, help="settings of peft's LoraConfig, as JSON; absent: all weights train"
    )
    parser.add_argument("--reward", choices=("exact", "number"), required=True, help="rule of a right answer")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--eval-every", type=int, default=0)
    return parser.parse_args()


def is_right(text: str, ids: list[int], answer: str, rule: str, eos: int) -> bool:
    """Judge an ended answer: its whole text, or its last number, equals the right one."""
    if eos not in ids:
        return False
    said = text if rule == "exact" else (re.findall(r"\d+", text) or [""])[-1]
    return bool(said == answer)


def held_out(model: Any, tokenizer: Any, tasks: list[dict[str, Any]], rule: str, new_tokens: int) -> float:
    """Return the share of sampled answers that are right, and leave the random state as it was."""
    import torch

    state, was = torch.get_rng_state(), model.training
    torch.manual_seed(1234)
    model.eval()
    right = 0
    for at in range(0, len(tasks), EVAL_BATCH):
        part = tasks[at : at + EVAL_BATCH]
        prompts = tokenizer(
            [as_text(tokenizer, task["prompt"]) for task in part], return_tensors="pt", padding=True, padding_side="left",
            return_token_type_ids=False,
        )  # fmt: skip
        with torch.no_grad():
            made = model.generate(
                **prompts, max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
            )
        for task, row in zip(part, made[:, prompts["input_ids"].shape[1] :].tolist(), strict=True):
            ids = row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row
            text = tokenizer.decode(ids, skip_special_tokens=True)
            right += is_right(text, ids, task["answer"], rule, tokenizer.eos_token_id)
    model.train(was)
    torch.set_rng_state(state)
    return right / len(tasks)


def as_text(tokenizer: Any, prompt: Any) -> str:
    """Return a prompt as text: a chat through the model's template."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


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

    def evaluated() -> float:
        return held_out(model, tokenizer, tasks, options.reward, options.settings["max_completion_length"])

    evals = [(0, evaluated())] if options.eval_every else []

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
                evals.append((state.global_step, evaluated()))
                self.paused += time.perf_counter() - now
                self.paused_cpu += time.process_time() - cpu

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs and steps:
                steps[-1]["reward"] = float(logs["reward"])

    def reward(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        rule, eos = options.reward, tokenizer.eos_token_id
        return [float(is_right(*one, rule, eos)) for one in zip(texts, completion_ids, answer, strict=True)]

    adapters = {}
    if options.lora:
        from peft import LoraConfig

        adapters["peft_config"] = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **options.lora)
    common = {
        "output_dir": tempfile.mkdtemp(prefix="trl-peer-"), "use_cpu": True, "fp16": False, "gradient_checkpointing": False,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=trl.GRPOConfig(**common, **options.settings), processing_class=tokenizer,
        train_dataset=Dataset.from_list(train), callbacks=[Watch()], **adapters,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print(json.dumps({"steps": steps, "evals": evals, "trl": trl.__version__, "torch": torch.__version__}))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
