# SPDX-License-Identifier: Apache-2.0
"""An engine's own offline call on the prompts of `engines.py`, in that engine's interpreter: the peer of what Relax asks of it.

vLLM's is `LLM.generate`; SGLang's the loop of its scheduler with its own sampler, without the processes around it;
transformers' is `generate` over one padded batch, which lasts as long as its longest row. None has seeds or log-probs.
A line of prompts and lengths on standard input is one step; a line of seconds and processor seconds answers it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

WORD = "relax-peer "
"""Before answers: libraries print too."""
CACHE_MB = 256
Prompts = list[list[int]]
Generate = Callable[[Prompts, Sequence[int]], None]


def vllm(folder: str, context: int) -> Generate:
    from relax_plugin_vllm.environment_variables import prepare
    from relax_plugin_vllm.options import VllmOptions

    from relax_core.api.engine import EngineSpec

    prepare()
    from relax_plugin_vllm.model import arguments_of
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments_of(EngineSpec({"path": folder}, context), VllmOptions(kv_cache_mb=CACHE_MB)))

    def generate(prompts: Prompts, new: Sequence[int]) -> None:
        params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in new]
        done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        _count([len(output.outputs[0].token_ids) for output in done], new)

    return generate


def sglang(folder: str, context: int) -> Generate:
    from relax_plugin_sglang.cpu_stand_ins import install
    from relax_plugin_sglang.environment_variables import on_gpu, prepare
    from relax_plugin_sglang.options import SglangOptions

    from relax_core.api.engine import EngineSpec

    prepare()
    if not on_gpu():
        install(gpu=False)
    import itertools
    from array import array

    import torch
    from relax_plugin_sglang.launch import launch
    from relax_plugin_sglang.sampler import Row
    from sglang.srt.layers.sampler import create_sampler
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    scheduler, names = launch(EngineSpec({"path": folder}, context), SglangOptions()), itertools.count()
    scheduler.tp_worker.model_runner.sampler = create_sampler()

    def take(prompt: list[int], count: int) -> str:
        params = SamplingParams(max_new_tokens=count, temperature=1.0, ignore_eos=True)
        params.normalize(None)
        name = f"{next(names):016}"
        request: dict[str, Any] = {
            "rid": name, "input_text": None, "input_ids": array("q", prompt), "input_embeds": None, "mm_inputs": None,
            "token_type_ids": None, "sampling_params": params, "return_logprob": False, "logprob_start_len": -1,
            "top_logprobs_num": 0, "token_ids_logprob": None, "stream": False,
        }  # fmt: skip
        scheduler.take(TokenizedGenerateReqInput(**request), Row(name, None))
        return name

    def generate(prompts: Prompts, new: Sequence[int]) -> None:
        with torch.inference_mode():
            order = [take(prompt, count) for prompt, count in zip(prompts, new, strict=True)]
            made: dict[str, int] = {}
            while len(made) < len(order):
                scheduler.updated.clear()
                scheduler.step()
                made.update((req.rid, len(req.output_ids)) for req in scheduler.updated if req.finished())
        _count([made[name] for name in order], new)

    return generate


def transformers(folder: str, context: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: Prompts, new: Sequence[int]) -> None:
        ids = torch.tensor(prompts)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(new), do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, pad_token_id=0,
        )  # fmt: skip
        _count([min(made.shape[1] - ids.shape[1], count) for count in new], new)

    return generate


def _count(made: Sequence[int], wanted: Sequence[int]) -> None:
    if list(made) != list(wanted):
        raise RuntimeError(f"{sum(made)} tokens came of {sum(wanted)}")


def main() -> None:
    engine, folder, context = sys.argv[1:]
    generate = {"vllm": vllm, "sglang": sglang, "transformers": transformers}[engine](folder, int(context))
    print(f"{WORD}ready", flush=True)
    for line in sys.stdin:
        step = json.loads(line)
        begun, cpu = time.perf_counter(), time.process_time()
        generate(step["prompts"], step["new"])
        print(f"{WORD}{json.dumps([time.perf_counter() - begun, time.process_time() - cpu])}", flush=True)


if __name__ == "__main__":
    main()
