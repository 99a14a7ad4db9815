"""What the user chose about an engine: one frozen value that every layer reads.

Nothing is ever written to it after it was made. What the checkpoint is says `ModelConfig`, and what is *measured*
(how many blocks fit) travels separately as `CacheSize`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.memory import choose_block_size, expected_waste, show_bytes
from jaxllm.model_config import ModelConfig

logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["auto", "xla", "pallas"]
LoadFormat = Literal["auto", "dummy"]
GenerationDefaults = Literal["auto", "none"]
SCHEDULING_POLICIES = ("fcfs", "priority", "sjf", "dynamic")
PreemptionVictim = Literal["last_joined", "least_progress", "lowest_priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its type."""
DEFAULT_SWAP_GIB = 4  # vLLM's
MAY_BE_AUTO = ("max_model_len", "block_size")

ENGINE_TOPICS = {
    "model": "model",
    "memory and cache": "max_model_len",
    "batching": "max_num_seqs",
    "devices and parallelism": "device",
    "compilation and kernels": "enforce_eager",
}
"""What the fields of `EngineConfig` are about: a topic begins at the field named here and ends before the next one's."""


@dataclass(frozen=True)
class EngineConfig:
    """Every choice a user can make about an engine.

    Command-line flags and keyword arguments of `LLM` and `LLMEngine` are made from these fields.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and the remedy.
    """

    model: str
    """Short name (`jaxllm pull` lists them), GGUF file, Hugging Face folder, or hub id."""
    tokenizer: str | None = None
    """Folder or hub id to take the tokenizer from; by default the model's own."""
    dtype: DType = "auto"
    """Type of weights, activations and K/V cache. auto: float32 on a CPU; on a GPU the checkpoint's, or bfloat16
    where that is float32 or quantised."""
    seed: int = 0
    """Seed of the engine; requests without a seed of their own draw theirs from it."""
    load_format: LoadFormat = "auto"
    """Where weights come from. auto: the checkpoint. dummy: they are random, for measuring speed; MODEL may then be a
    folder with nothing but a config.json, or a shape that is built in, as llama-3.1-8b (`jaxllm models` lists them)."""

    generation_config: GenerationDefaults = "auto"
    """Where the sampling parameters of requests that bring none come from. auto: the model's generation_config.json,
    if there is one. none: jaxllm's own defaults."""
    logits_processors: Sequence[str | Callable[..., Any]] = ()
    """Functions that all logits go through before a token is chosen: pure ones of JAX, from float32 [rows, vocab] to
    the like, or where to import them from, as package.module:function."""

    max_logprobs: int = 20
    """Most tokens whose log-probabilities a request may ask for at a position (`logprobs`, `prompt_logprobs`); -1 is no
    limit. More than 20 of them come from a program of their own, one step a call."""

    max_model_len: int | Literal["auto"] | None = None
    """Longest prompt plus output of one request, in tokens; by default the checkpoint's context length. auto: what
    fits into memory, if that is less."""
    block_size: int | Literal["auto"] = 16
    """Tokens in one block of the K/V cache; a power of two. auto: 16 to 128, the smaller the more bytes a token takes."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory the engine may take for weights, K/V cache and temporaries."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of K/V cache per device, instead of what gpu_memory_utilization leaves (on a CPU: of at most 2 GiB)."""
    num_gpu_blocks_override: int | None = None
    """Number of K/V cache blocks, instead of a number derived from memory."""
    enable_prefix_caching: bool = True
    """Keep K/V of finished requests until memory is needed, the least recently used go first: what prompts begin with
    in common is computed once."""

    swap_space: float | None = None
    """GiB of host memory per device for K/V: of preempted requests, and of cached blocks that the device has no room
    for; by default 4 on a GPU and none on a CPU, where the K/V cache is in the same memory: enlarge that instead."""
    preemption_mode: PreemptionMode = "auto"
    """What becomes of a preempted request's K/V. swap: they go to host memory while there is room. recompute: they are
    computed again. auto: what takes less time, as measured at the start (with enforce_eager, which does not: recompute)."""

    max_num_seqs: int | None = None
    """Most requests running at once; by default 256 on a GPU, 16 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; by default 8192 on a GPU, 128 on a CPU."""
    max_steps_in_flight: int = 2
    """Steps launched before the oldest is read: 2 hides the host behind the device, 1 is synchronous."""
    num_scheduler_steps: int | None = None
    """Most decode steps that one call does on the device while nobody waits and the host is slower than the device;
    by default 4 on a GPU, 1 on a CPU."""
    long_prefill_token_threshold: int = 0
    """Prompts with more tokens than this to compute get this many together in a step, in chunks, so that answers under
    way wait for one chunk at the most; 0 is no limit but max_num_batched_tokens."""
    scheduling_policy: Any = "fcfs"
    """Who of the waiting is next: fcfs (who came first), priority (lowest `priority` of a request, which may preempt
    others), sjf (shortest job first, with ageing), dynamic (priority, waiting time and size under pressure); or an
    AdmissionOrder of one's own, or where to find its class, as package.module:Class."""
    preemption_victim: PreemptionVictim | None = None
    """Who has to go, with all of its blocks, if they run short: last_joined, least_progress (fewest tokens computed) or
    lowest_priority; by default the last, where the policy heeds priority, else the first."""

    device: str | None = None
    """Platform and first device, as "cuda", "cuda:0" or "cpu"; by default what JAX finds first."""
    tensor_parallel_size: int = 1
    """Number of devices every layer is split over. Each has whole K/V heads: several have the same where there are few."""
    disable_custom_all_reduce: bool = False
    """Let NCCL add up what several GPUs computed, in one CUDA graph, instead of XLA's kernels between graphs."""

    enforce_eager: bool = False
    """Compile each shape when it is first met, without CUDA graphs: starts sooner, runs slower."""
    attention_backend: AttentionBackend = "auto"
    """Implementation of paged attention; auto takes the fastest for the device."""
    batch_invariant: bool = False
    """Give a request the same bits whatever else runs, however its prompt is cut and wherever its K/V come from: every
    sum has one order. On GPUs, in bfloat16 or float16; prompts are computed more slowly."""
    compilation_cache: bool = True
    """Keep compiled programs in the cache folder (JAXLLM_CACHE), so that the next start is fast."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_processors()
        self._check_scheduling()
        self._check_swapping()
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(
                f"gpu_memory_utilization={share!r} is not a share of memory: "
                "use a number above 0 and at most 1, 0.9 for example"
            )
        if self.block_size != "auto" and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} is not a power of two: use 16, 32, 64 or 128, or 'auto'")
        for name, choices in (
            ("dtype", DType.__args__),
            ("load_format", LoadFormat.__args__),
            ("generation_config", GenerationDefaults.__args__),
            ("attention_backend", AttentionBackend.__args__),
            ("preemption_mode", PreemptionMode.__args__),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(choices)}")
        for name, kind in (
            *(("model", str), ("tokenizer", str | None), ("device", str | None)),
            *(("seed", int), ("enable_prefix_caching", bool), ("disable_custom_all_reduce", bool)),
            *(("enforce_eager", bool), ("batch_invariant", bool), ("compilation_cache", bool)),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} has the wrong type: use {kind}")

    def _check_processors(self) -> None:
        named = self.logits_processors
        if isinstance(named, str) or not isinstance(named, Iterable):
            raise ValueError(f"logits_processors={named!r} is not valid: use a list of functions")
        object.__setattr__(self, "logits_processors", tuple(named))
        for one in self.logits_processors:
            if not isinstance(one, str) and not callable(one):
                raise ValueError(f"logits_processors has {one!r}: use functions, or texts as 'package.module:function'")

    def _check_scheduling(self) -> None:
        policy, victim = self.scheduling_policy, self.preemption_victim
        if policy is None or (isinstance(policy, str) and policy not in SCHEDULING_POLICIES and ":" not in policy):
            raise ValueError(
                f"scheduling_policy={policy!r} is unknown: use {', '.join(SCHEDULING_POLICIES)}, an AdmissionOrder, "
                "or 'package.module:Class'"
            )
        if victim is not None and victim not in PreemptionVictim.__args__:
            raise ValueError(
                f"preemption_victim={victim!r} is unknown: use one of {', '.join(PreemptionVictim.__args__)}"
            )
        for name, no_limit in (("long_prefill_token_threshold", 0), ("max_logprobs", -1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < no_limit:
                raise ValueError(f"{name}={value!r} has to be a whole number, {no_limit} for no limit")

    def _check_swapping(self) -> None:
        space, mode = self.swap_space, self.preemption_mode
        is_number = isinstance(space, int | float) and not isinstance(space, bool)
        if space is not None and not (is_number and 0 <= space < float("inf")):
            raise ValueError(f"swap_space={space!r} is not an amount of memory: use GiB per device, or 0 for none")
        if mode == "swap" and space == 0:
            raise ValueError(
                "preemption_mode='swap' needs host memory, and swap_space=0 gives none: raise it, or use 'auto'"
            )

    def _check_counts(self) -> None:
        optional = {item.name for item in dataclasses.fields(self) if item.default is None}
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "tensor_parallel_size",
            "max_steps_in_flight",
            "num_scheduler_steps",
        ):
            value, or_auto = getattr(self, name), " or 'auto'" if name in MAY_BE_AUTO else ""
            if (value is None and name in optional) or (or_auto and value == "auto"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} has to be a whole number of at least 1{or_auto}")

    def resolve(self, model: ModelConfig, platform: str) -> EngineConfig:
        """A copy in which every default is a value, for this model on this platform ("cpu", "gpu").

        max_model_len="auto" stays: `ModelRunner` has the number once it knows what fits.

        Raises:
            ValueError: the values contradict the model or each other.
        """
        on_cpu = platform == "cpu"
        stored = "bfloat16" if model.dtype == "float32" else model.dtype
        max_num_seqs = self.max_num_seqs or min(16 if on_cpu else 256, self.max_num_batched_tokens or 256)
        dtype = ("float32" if on_cpu else stored) if self.dtype == "auto" else self.dtype
        resolved = dataclasses.replace(
            self,
            dtype=dtype,
            swap_space=(0 if on_cpu else DEFAULT_SWAP_GIB) if self.swap_space is None else self.swap_space,
            block_size=self._choose_block_size(model, dtype) if self.block_size == "auto" else self.block_size,
            max_model_len=self.max_model_len or model.max_position_embeddings,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(128 if on_cpu else 8192, max_num_seqs),
        )
        if on_cpu and self.attention_backend == "pallas":
            raise ValueError("attention_backend='pallas' needs a GPU: use 'auto' or 'xla'")
        resolved._check_order(on_cpu)
        resolved._check_against(model)
        return resolved

    def _check_order(self, on_cpu: bool) -> None:
        if not self.batch_invariant:
            return
        if on_cpu:
            raise ValueError("batch_invariant=True needs a GPU, and this is a CPU: leave it out")
        if self.attention_backend == "xla":
            raise ValueError("batch_invariant=True needs attention_backend='pallas', and it is 'xla': leave one out")
        if self.dtype == "float32":
            raise ValueError(
                "batch_invariant=True needs dtype='bfloat16' or 'float16', and dtype is float32: change one"
            )

    def _choose_block_size(self, model: ModelConfig, dtype: str) -> int:
        """What "auto" is for this model; says why."""
        longest = self.max_model_len if isinstance(self.max_model_len, int) else model.max_position_embeddings
        bytes_per_token = model.kv_bytes_per_token(ITEMSIZES[dtype]) // self.tensor_parallel_size
        size = choose_block_size(bytes_per_token, longest)
        waste = expected_waste(size)
        logger.info(
            "block_size='auto' is %d: a token takes %s on a device; a request wastes %.1f tokens of its last block on "
            "average, %s, which is %.2g %% of %d tokens",
            *(size, show_bytes(bytes_per_token), waste, show_bytes(round(waste * bytes_per_token))),
            *(100 * waste / longest, longest),
        )
        return size

    def _check_against(self, model: ModelConfig) -> None:
        assert self.max_model_len and self.max_num_seqs and self.max_num_batched_tokens, "unresolved defaults"
        if self.max_model_len != "auto" and not 2 <= self.max_model_len <= model.max_position_embeddings:
            raise ValueError(
                f"max_model_len={self.max_model_len} is not between 2 and {model.max_position_embeddings}, "
                "the context length of this model: choose one that is"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step has to hold a token of every running request; raise the first or lower the second"
            )
