"""Counts the tokens of a request, as clients are billed for them.

The invariant: a prompt counts once, however many answers it has.
"""

from __future__ import annotations

from jaxllm.outputs import RequestOutput
from jaxllm.serving.protocol import Usage


class UsageCounter:
    """The tokens of all prompts and answers so far."""

    def __init__(self) -> None:
        self.num_generated = 0
        self._prompts: dict[int, tuple[int, int]] = {}

    def note(self, index: int, output: RequestOutput) -> None:
        """Add an output that holds only what is new of the prompt with this index."""
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for answer in output.outputs:
            self.num_generated += len(answer.token_ids)

    @property
    def num_prompt(self) -> int:
        return sum(length for length, _ in self._prompts.values())

    @property
    def usage(self) -> Usage:
        num_cached = sum(cached for _, cached in self._prompts.values())
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
