"""`LLM`: batches of prompts, answered in one call. A loop over `LLMEngine.step`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from jaxllm.debug import MemoryStats, memory_stats, print_memory_stats
from jaxllm.engine.beam_search import BeamSearch, Candidate
from jaxllm.engine.chat_template import Message
from jaxllm.engine.engine import LLMEngine
from jaxllm.engine.interrupts import note_interrupt
from jaxllm.engine.request_maker import Prompt
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxllm.profiling.report import Profile, Recording, write_report
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

type Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its batch interface.

    Use it in a `with` statement, or call `close`, to free the device's memory. Threads that call it at once are answered
    one after the other; `AsyncLLM` answers many callers together.

    Args:
        model: short name, GGUF file, Hugging Face folder, or hub id.
        fields: further fields of `EngineConfig`, as dtype, max_model_len or tensor_parallel_size.

    Raises:
        ValueError: the model or a field is not usable; the message says why and what helps.
        TypeError: a keyword that is no field.
    """

    def __init__(self, model: str, **fields: Any):
        self.engine = LLMEngine(model, **fields)
        self._request_numbers = itertools.count()
        self._turn = threading.RLock()
        """Of who uses the engine: two who step it would each read what the other one launched."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: one text, a list of texts, the token ids of one prompt, or a list of those.
            sampling_params: for all prompts, or one for each; by default `get_default_sampling_params`.
            use_tqdm: show a progress bar on a terminal.
            priority: one for each prompt, the lower the sooner; for a `scheduling_policy` that heeds it.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or its parameters cannot be served; then none of the prompts was run.
        """
        listed = _as_list(prompts)
        params = _params_for(listed, self.get_default_sampling_params() if sampling_params is None else sampling_params)
        priorities = _priorities_for(listed, priority)
        with self._turn:
            return self._run(self._enter(listed, params, priorities), use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The most likely answers to prompts, found and scored as by transformers.

        Args:
            prompts: as for `generate`.
            params: how to search.
            use_tqdm: show a progress bar on a terminal for each token.

        Raises:
            ValueError: a prompt or the parameters cannot be served.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={params!r} is not a BeamSearchParams")
        listed = _as_list(prompts)
        searches = [self._make_search(prompt, params) for prompt in listed]
        salts = [prompt.get("cache_salt") if isinstance(prompt, dict) else None for prompt in listed]
        self._search(searches, salts, use_tqdm)
        return [BeamSearchOutput([self._with_text(one, search) for one in search.sequences()]) for search in searches]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, put into the model's chat template.

        Args:
            messages: one conversation as a list of {"role", "content"}, or a list of conversations.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            chat_template_kwargs: further variables of the template.
            priority: one for each conversation, as for `generate`.

        Raises:
            ValueError: the model has no chat template, or a message is malformed.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        prompts: list[Prompt] = [
            self.engine.tokenizer.encode_chat(
                conversation, add_generation_prompt=add_generation_prompt, **(chat_template_kwargs or {})
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm, priority)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends (`generation_config`), else `SamplingParams()`."""
        return self.engine.default_params

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def memory_stats(self) -> MemoryStats:
        """What the engine holds on its devices, and how the blocks of its K/V cache are used."""
        return memory_stats(self.engine)

    def print_memory_stats(self) -> None:
        """Prints `memory_stats` as tables."""
        print_memory_stats(self.engine)

    def reset_prefix_cache(self) -> bool:
        """Forgets the K/V of finished requests; False and nothing changed while requests are running."""
        return self.engine.reset_prefix_cache()

    @contextlib.contextmanager
    def profile(self, folder: str | Path) -> Iterator[Recording]:
        """Records what runs within the `with` statement; see `start_profile`."""
        recording = Recording()
        self.start_profile(folder)
        try:
            yield recording
        except BaseException:
            self.engine.core.stop_profile()
            raise
        recording.profile = self.stop_profile()

    def start_profile(self, folder: str | Path) -> None:
        """Records from now on what host and device do, below `folder`, for Perfetto, XProf and `stop_profile`.

        Steps are then done one a call; they take as long as others.

        Raises:
            ValueError: something is being recorded already.
            OSError: the folder cannot be written to.
        """
        self.engine.core.start_profile(Path(folder))

    def stop_profile(self) -> Profile:
        """Ends the recording; returns where it lies and what it says.

        Raises:
            ValueError: nothing is being recorded, or no step ran meanwhile.
        """
        return write_report(self.engine.core.stop_profile())

    def close(self) -> None:
        """Frees the devices."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_search(self, prompt: Prompt, params: BeamSearchParams) -> BeamSearch:
        _, request = self.engine.make_request("beam", prompt, SamplingParams(max_tokens=params.max_tokens))
        longest = request.max_len - request.prompt_len
        limit = self.engine.config.max_logprobs
        return BeamSearch(request.prompt_ids, params, request.eos_token_ids, longest, limit)

    def _search(self, searches: Sequence[BeamSearch], salts: Sequence[str | None], use_tqdm: bool) -> None:
        """Brings all searches to their ends, a token of every hypothesis at a time."""
        while going := [(search, salt) for search, salt in zip(searches, salts, strict=True) if not search.is_over]:
            prompts = [
                cast(Prompt, {"prompt_token_ids": [*search.prompt_ids, *one.token_ids], "cache_salt": salt})
                for search, salt in going
                for one in search.running
            ]
            looks = [_look(search.num_candidates) for search, _ in going for _ in search.running]
            outputs = iter(self.generate(prompts, looks, use_tqdm))
            for search, _ in going:
                search.advance([_candidates(next(outputs), search.num_candidates) for _ in search.running])

    def _with_text(self, sequence: BeamSearchSequence, search: BeamSearch) -> BeamSearchSequence:
        own = sequence.tokens[len(search.prompt_ids) :]
        return dataclasses.replace(sequence, text=self.engine.tokenizer.decode(own))

    def _enter(self, prompts: list[Prompt], params: list[SamplingParams], priorities: Sequence[int]) -> list[str]:
        """Enters all prompts or, if one of them is refused, none."""
        request_ids: list[str] = []
        for index, (prompt, param, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            request_id = str(next(self._request_numbers))
            try:
                self.engine.add_request(request_id, prompt, param, priority)
            except BaseException as error:
                self._abort(request_ids)
                if isinstance(error, ValueError):
                    raise ValueError(f"prompt {index} of {len(prompts)}: {error}") from error
                raise
            request_ids.append(request_id)
        return request_ids

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens, started = 0, time.perf_counter()
        disable = None if use_tqdm else True
        progress = tqdm(total=len(request_ids), desc="Answering", unit="request", disable=disable)
        with note_interrupt() as interrupted, progress as bar:
            try:
                while self.engine.has_unfinished_requests():
                    if interrupted.is_set():
                        raise KeyboardInterrupt
                    for output in self.engine.step():
                        if output.finished:
                            finished[output.request_id] = output
                            num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                            speed = num_tokens / (time.perf_counter() - started)
                            bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                            bar.update()
            except BaseException:
                self._abort(request_ids)
                raise
        return [finished[request_id] for request_id in request_ids]

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort_request(request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt (text, dictionary or token ids) as a list of one."""
    if isinstance(prompts, str | bytes | dict):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r} is not valid: use a text, token ids, or a list of those")
    listed = list(cast(Iterable[Any], prompts))
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _params_for(prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [_final_only(params)] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"sampling_params has {len(params)} entries for {len(prompts)} prompts: give one, or one each")
    return [_final_only(param) for param in params]


def _priorities_for(prompts: list[Prompt], priority: Sequence[int] | None) -> Sequence[int]:
    if priority is None:
        return [0] * len(prompts)
    if not isinstance(priority, Sequence) or len(priority) != len(prompts):
        raise ValueError(f"priority={priority!r} is not valid for {len(prompts)} prompts: give a list of one each")
    return priority


def _final_only(params: SamplingParams) -> SamplingParams:
    """Nobody sees an answer before it is finished, so nothing is made of it before."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params={params!r} is not a SamplingParams")
    return dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _look(num_candidates: int) -> SamplingParams:
    """One token, for the sake of the candidates that are told with it."""
    return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=num_candidates)


def _candidates(output: RequestOutput, count: int) -> list[Candidate]:
    logprobs = output.outputs[0].logprobs
    assert logprobs, "a request for candidates came without"
    return [Candidate(token_id, one.logprob) for token_id, one in logprobs[0].items()][:count]
