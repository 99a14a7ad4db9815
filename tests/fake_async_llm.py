"""An `AsyncLLM` without a model: what a server asks of an engine, answered in microseconds and always the same.

Checking of requests, texts, stop strings and several answers are the engine's own; only the tokens are made up: an
answer goes round in a fixed text, and begins where the prompt and the seed say.
"""

import asyncio
import time
import zlib

from toy_tokenizers import byte_level

from jaxllm.config import EngineConfig
from jaxllm.engine.answers import Answers
from jaxllm.engine.async_llm import EngineDeadError
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.request_maker import RequestMaker
from jaxllm.model_config import ModelConfig
from jaxllm.outputs import Logprob, RequestTimes, TokenOutput
from jaxllm.request import FinishReason, Request

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)
ROUND = "The quick brown fox 🙂 jumps over the lazy dög. 你好!\n"


class FakeAsyncLLM:
    """Answers requests a token per step, `max_num_seqs` at a time.

    Args:
        step_seconds: what a step takes.
        is_loaded: it is ready at once.
    """

    def __init__(
        self, max_model_len=160, max_num_seqs=4, step_seconds=0.0, is_loaded=True, policy="fcfs", max_logprobs=20
    ):
        self.config = EngineConfig(
            "fake", max_model_len=max_model_len, max_num_seqs=max_num_seqs, scheduling_policy=policy,
            max_logprobs=max_logprobs,
        )  # fmt: skip
        self.model_config = ModelConfig(
            "fake", vocab_size=270, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
            intermediate_size=1, max_position_embeddings=max_model_len,
        )  # fmt: skip
        self.tokenizer = byte_level().with_chat_template(TEMPLATE)
        self.dead_error = None
        self.is_ready = self.is_running = is_loaded
        self.step_seconds = step_seconds
        self.running: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.salts: list[str | None] = []
        self.priorities: list[int] = []
        self.reset_result = True
        self.profile_folder: str | None = None
        self._maker = RequestMaker(self.tokenizer, self.config, self.model_config)
        self._answers = Answers(self.tokenizer)
        self._queues: dict[str, asyncio.Queue] = {}
        self._loop_task: asyncio.Task | None = None
        self._dead = asyncio.Event()
        self._num_generated = 0

    async def start(self):
        self.is_ready = self.is_running = True

    async def generate(self, prompt, params, request_id, priority=0):
        if self.dead_error is not None:
            raise self.dead_error
        times = RequestTimes(time.monotonic())
        text, request = self._maker.make(request_id, prompt, params, priority)
        self._answers.add(text, request)
        self.salts.append(request.cache_salt)
        self.priorities.append(request.priority)
        queue = self._queues[request_id] = asyncio.Queue()
        self.running |= {one.request_id: one for one in (request, *request.children)}
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._step_until_empty())
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                output.metrics = times
                self._add_logprobs(output, params)
                yield output
        finally:
            del self._queues[request_id]
            if not finished and self.dead_error is None:
                await self.abort(request_id)

    async def abort(self, request_id):
        members, output = self._answers.abort(request_id)
        for member in members:
            self.running.pop(member, None)
        if output is None:
            return False
        self.aborted.append(request_id)
        if request_id in self._queues:
            self._queues[request_id].put_nowait(output)
        return True

    def die(self):
        """As if the engine's process was killed."""
        self.dead_error = EngineDeadError("its process was killed")
        self.is_ready = self.is_running = False
        self._dead.set()
        for queue in self._queues.values():
            queue.put_nowait(self.dead_error)

    async def wait_dead(self):
        await self._dead.wait()
        return self.dead_error

    async def reset_prefix_cache(self):
        return self.reset_result

    async def start_profile(self, folder):
        if self.profile_folder is not None:
            raise ValueError("a profile is being recorded already")
        self.profile_folder = folder

    async def stop_profile(self):
        folder, self.profile_folder = self.profile_folder, None
        if folder is None:
            raise ValueError("no profile is being recorded")
        return {"folder": f"{folder}/plugins/profile/1", "summary": {"steps": 3}}

    async def stats(self):
        seats = self.config.max_num_seqs
        return EngineStats(
            num_running=min(len(self.running), seats),
            num_waiting=max(len(self.running) - seats, 0),
            num_generated_tokens=self._num_generated,
        )

    async def debug_requests(self):
        return [{"request_id": request_id} for request_id in self.running]

    async def memory(self):
        return {"devices": []}

    async def shutdown(self, timeout):
        self.is_ready = self.is_running = False
        self._dead.set()

    async def _step_until_empty(self):
        while self.running:
            await asyncio.sleep(self.step_seconds)
            outputs, stopped = self._answers.process([self._step(one) for one in self._scheduled()])
            for stop in stopped:
                self.running.pop(stop.request_id, None)
            for output in outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)

    def _scheduled(self):
        return list(self.running.values())[: self.config.max_num_seqs]

    def _step(self, request):
        token = fake_token(request)
        request.append_tokens([token], [-0.5])
        request.num_tokens += 1
        self._num_generated += 1
        reason = FinishReason.LENGTH if request.num_tokens >= request.max_len else None
        if token in request.stop_token_ids:
            reason = FinishReason.STOP
        if reason is not None:
            del self.running[request.request_id]
        stop = token if reason is FinishReason.STOP else None
        return TokenOutput(request.request_id, (token,), (-0.5,), reason, stop)

    def _add_logprobs(self, output, params):
        num_top = getattr(params, "logprobs", None)
        for one in output.outputs:
            one.logprobs = None if num_top is None else [self._logprobs(token, num_top) for token in one.token_ids]
        output.prompt_logprobs = None
        if getattr(params, "prompt_logprobs", None) is not None:
            rest = [self._logprobs(token, params.prompt_logprobs) for token in output.prompt_token_ids[1:]]
            output.prompt_logprobs = [None, *rest]

    def _logprobs(self, token, num_top):
        """The token itself is the second best; -1 is all bytes."""
        num_top = 255 if num_top == -1 else num_top
        ids = [token, *((token + 1 + index) % 256 for index in range(num_top))]
        ranks = [2, 1, *range(3, 2 + num_top)]
        return {
            one: Logprob(-0.25 * rank, rank, self.tokenizer.decode([one]))
            for one, rank in zip(ids, ranks, strict=False)
        }


def fake_token(request):
    data = ROUND.encode()
    start = zlib.crc32(bytes(token % 256 for token in request.prompt_ids), request.seed % 2**32)
    return data[(start + len(request.output_ids)) % len(data)]


def fake_text(prompt: str, num_tokens: int, seed: int = 0) -> str:
    """What a text prompt is answered with under a seed."""
    data = ROUND.encode()
    start = zlib.crc32(bytes(token % 256 for token in byte_level().encode(prompt)), seed)
    answer = bytes(data[(start + index) % len(data)] for index in range(num_tokens))
    return answer.decode(errors="replace")
