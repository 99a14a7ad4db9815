"""Several answers to one prompt (n > 1): each is a request to the engine core, together they are one to the caller.

Invariant: for a group the caller sees outputs of its own id only, with answers at their indices, and the last of
them, with all answers finished, exactly once. Outputs of other requests pass through untouched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.request import Request
from jaxllm.sampling_params import RequestOutputKind


@dataclass(eq=False)
class _Group:
    request_id: str
    kind: RequestOutputKind
    answers: list[CompletionOutput]
    """The latest state of each."""
    unfinished: dict[str, int]
    """Indices of the answers that go on, by the ids of their requests."""
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Those of the first answer; with DELTA until they were told."""


class AnswerGroups:
    """The unfinished requests with several answers."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._by_member: dict[str, _Group] = {}

    def add(self, request: Request) -> None:
        """A request with children; its id is also that of its first answer's request."""
        ids = [request.request_id, *(child.request_id for child in request.children)]
        asks = request.params.logprobs is not None
        answers = [CompletionOutput(index, "", [], 0.0, logprobs=[] if asks else None) for index in range(len(ids))]
        members = {member: index for index, member in enumerate(ids)}
        group = _Group(request.request_id, request.params.output_kind, answers, members)
        self._groups[group.request_id] = group
        self._by_member.update(dict.fromkeys(ids, group))

    def __contains__(self, request_id: object) -> bool:
        """Whether an unfinished group has this id."""
        return request_id in self._groups

    def unfinished(self, request_id: str) -> list[str]:
        """Ids of a group's requests that go on; of a request that is no group, its own."""
        group = self._groups.get(request_id)
        return [request_id] if group is None else list(group.unfinished)

    def merge(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """What the caller gets to see of a step's outputs."""
        if not self._groups:
            return list(outputs)
        merged: list[RequestOutput] = []
        changed: dict[_Group, list[RequestOutput]] = {}
        for output in outputs:
            group = self._by_member.get(output.request_id)
            if group is None:
                merged.append(output)
            else:
                changed.setdefault(group, []).append(output)
        for group, news in changed.items():
            latest = [self._take(group, output) for output in news]
            if group.kind is not RequestOutputKind.FINAL_ONLY or not group.unfinished:
                answers = latest if group.kind is RequestOutputKind.DELTA else group.answers.copy()
                merged.append(self._report(group, news[0], answers))
        return merged

    def _take(self, group: _Group, output: RequestOutput) -> CompletionOutput:
        (answer,) = output.outputs
        answer.index = group.unfinished[output.request_id]
        group.answers[answer.index] = answer
        if answer.index == 0:
            group.num_cached_tokens = output.num_cached_tokens
            group.prompt_logprobs = output.prompt_logprobs
        if output.finished:
            del group.unfinished[output.request_id], self._by_member[output.request_id]
        return answer

    def _report(self, group: _Group, output: RequestOutput, answers: list[CompletionOutput]) -> RequestOutput:
        finished = not group.unfinished
        if finished:
            del self._groups[group.request_id]
        cached = group.num_cached_tokens
        told = group.prompt_logprobs
        if group.kind is RequestOutputKind.DELTA:
            group.prompt_logprobs = None
        return RequestOutput(group.request_id, output.prompt, output.prompt_token_ids, answers, finished, cached, told)
