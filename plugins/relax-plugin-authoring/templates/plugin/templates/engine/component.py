"""The engine `{{ cookiecutter.name }}`: sends requests to an executor that batches and samples by itself.

`ExecutorClient` is the adapter. `serve` and the functions below stand in for your library or server: replace them. The
stand-in is a thread behind a pipe; a process or a server can take the same messages.
"""

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from relax_core.api import EngineSpec, GenerateRequest, Options
from relax_core.api.engine import Capabilities
from relax_core.engine_kit.model_weights import as_tensor
from relax_core.engine_kit.stepped_engine import StepOutput, SteppedEngine, Stepper


class {{ cookiecutter.class_name }}(SteppedEngine[Options]):
    """An engine with one executor. The base class refuses invalid requests and versions, and labels tokens."""

    capabilities = Capabilities(in_flight_updates=True, seeds=True)  # the planner refuses runs that need more

    async def start(self, spec: EngineSpec) -> Mapping[str, Any]:
        from transformers import AutoModelForCausalLM

        # In the inline runner this runs on the run's only thread: transformers cannot load two models at once.
        load, dtype = AutoModelForCausalLM.from_pretrained, spec.model["dtype"]
        self._model = await asyncio.to_thread(load, spec.model["path"], dtype=dtype, local_files_only=True)
        return await super().start(spec)

    def prepare(self) -> Mapping[str, Any]:
        return {"device": "cpu"}

    def make(self, spec: EngineSpec) -> Stepper:
        return ExecutorClient(spec, self._model.eval())


class ExecutorClient(Stepper):
    """The executor, seen step by step. The executor samples ahead; `step` fetches the tokens that it has sampled."""

    def __init__(self, spec: EngineSpec, model: Any) -> None:
        self.dtype, config = spec.model["dtype"], model.config
        self.vocab_size, self.model_type = config.vocab_size, config.model_type
        self.max_context = min(spec.max_context, config.max_position_embeddings)
        self._open: dict[str, GenerateRequest] = {}  # the rest of each request, with the fetched tokens in its prompt
        self._pipe, there = Pipe()
        self._executor = threading.Thread(target=serve, args=(there, model), daemon=True)
        self._executor.start()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, *arguments))
        return self._pipe.recv()  # EOFError if the executor has ended: the engine fails, and Relax replaces it

    def add(self, request: GenerateRequest) -> None:
        self._open[request.id] = request
        self._call("add", request)

    def abort(self, names: Sequence[str]) -> None:
        self._call("drop", names)
        self._open = {name: request for name, request in self._open.items() if name not in names}

    def step(self) -> Mapping[str, StepOutput]:
        outputs: dict[str, StepOutput] = self._call("take")
        for name, new in outputs.items():
            request = self._open.pop(name)
            if not new.finish:
                self._open[name] = rest(request, new.tokens)
        return outputs

    def load(self, arrays: Iterable[tuple[str, np.ndarray, str]]) -> None:
        """Replace the weights. Tokens that `step` has not fetched are dropped, because they are of the old version."""
        self._call("drop", list(self._open))
        for name, array, dtype in arrays:
            self._call("load", name, np.array(array), dtype)
        for request in self._open.values():
            self._call("add", request)

    def stop(self) -> None:
        self._pipe.close()
        self._executor.join()


def rest(request: GenerateRequest, tokens: tuple[int, ...]) -> GenerateRequest:
    """Return the request that continues `request` after `tokens`."""
    return replace(request, tokens=request.tokens + tokens, max_new_tokens=request.max_new_tokens - len(tokens))


def serve(pipe: Connection, model: Any) -> None:
    """Run the executor until the engine closes the pipe: answer calls, and sample while there are none."""
    running: dict[str, GenerateRequest] = {}
    sampled: dict[str, StepOutput] = {}
    with pipe, suppress(EOFError, ConnectionError):
        while True:
            while running and not pipe.poll():
                sample(model, running, sampled)
            answer = None
            match pipe.recv():
                case "add", request:
                    running[request.id] = request
                case "drop", names:
                    for name in names:
                        running.pop(name, None)
                        sampled.pop(name, None)
                case "load", name, array, stored:
                    model.state_dict()[name].copy_(as_tensor(array, stored))
                case ("take",):
                    if not sampled:
                        sample(model, running, sampled)
                    answer, sampled = sampled, {}
            pipe.send(answer)


def sample(model: Any, running: dict[str, GenerateRequest], sampled: dict[str, StepOutput]) -> None:
    """Sample one token for each running request, in one batch and without a KV cache."""
    import torch

    prompts = [torch.tensor(request.tokens) for request in running.values()]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # causal attention ignores the padding
    with torch.inference_mode():
        logits = model(input_ids=padded, use_cache=False).logits.double().numpy()
    for request, row in zip(list(running.values()), logits, strict=True):
        token, log_prob, top = draw(row[len(request.tokens) - 1], request)
        new = sampled.setdefault(request.id, StepOutput((), ()))
        new.tokens, new.log_probs, new.top = (*new.tokens, token), (*new.log_probs, log_prob), (*new.top, top)
        new.finish = "stop" if token in request.stop_tokens else "length" if request.max_new_tokens == 1 else ""
        running[request.id] = rest(request, (token,))
        if new.finish:
            del running[request.id]


def draw(logits: np.ndarray, request: GenerateRequest) -> tuple[int, float, tuple[tuple[int, float], ...]]:
    """Return a token, its log-prob in the distribution that it was drawn from, and the likeliest tokens."""
    logits = logits / (request.temperature or 1.0)
    logits[list(request.suppress_tokens)] = -np.inf
    log_probs = logits - np.logaddexp.reduce(logits)
    order = (-log_probs).argsort(kind="stable")
    sums = np.exp(log_probs[order[: request.top_k or None]]).cumsum()
    sums = sums[: np.searchsorted(sums, request.top_p * sums[-1]) + 1]
    # One seed for each position: a request that continues on another engine draws the same tokens.
    drawn = np.random.default_rng((request.seed, len(request.tokens))).random() * sums[-1]
    token = order[0 if request.temperature == 0 else np.searchsorted(sums, drawn, side="right")]
    log_prob = log_probs[token] - (0.0 if request.temperature == 0 else np.log(sums[-1]))
    return int(token), float(log_prob), tuple((int(i), float(log_probs[i])) for i in order[: request.num_top])
