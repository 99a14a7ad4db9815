"""Batches of requests whose time is measured, as token ids.

Invariant: a workload is a pure function of its arguments. Those of other seeds have no prefix in common, so
that a run to warm up, or an earlier measurement, leaves nothing in a prefix cache for the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NANO_SHORTEST, NANO_LONGEST, NANO_VOCAB = 100, 1024, 10001


@dataclass(frozen=True)
class Workload:
    """Prompts and how long their answers are."""

    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_tokens_of_longest(self) -> int:
        """Prompt and answer."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def nano(num_prompts: int = 256, longest: int = NANO_LONGEST, variant: int = 0, vocab_size: int = 10**9) -> Workload:
    """nano-vllm's benchmark; the defaults are exactly its 142,827 prompt and 133,966 output tokens.

    Args:
        longest: most tokens of a prompt, and of an answer.
        variant: any other than 0 is added to every token: the same lengths, other prompts.
        vocab_size: tokens of a smaller vocabulary are wrapped around.
    """
    rng = random.Random(0)
    shortest = min(NANO_SHORTEST, longest)
    prompts = [
        [rng.randint(0, NANO_VOCAB - 1) for _ in range(rng.randint(shortest, longest))] for _ in range(num_prompts)
    ]
    output_lens = [rng.randint(shortest, longest) for _ in range(num_prompts)]
    shifted = [[(token + variant) % NANO_VOCAB % vocab_size for token in prompt] for prompt in prompts]
    return Workload(shifted, output_lens)


def same_length(num_prompts: int, prompt_len: int, output_len: int, vocab_size: int, seed: int) -> Workload:
    """Random prompts, all of one length."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, prompt_len, vocab_size) for _ in range(num_prompts)]
    return Workload(prompts, [output_len] * num_prompts)


def shared_prefix(prefix: Sequence[int], own: Workload) -> Workload:
    """The requests of `own`, each behind the same prefix."""
    return Workload([[*prefix, *prompt] for prompt in own.prompts], own.output_lens)


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    return _tokens(random.Random(seed), length, vocab_size)


def _tokens(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return rng.choices(range(vocab_size), k=length)
