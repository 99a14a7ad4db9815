"""Which rows of a plan ask for log-probabilities, through chunks, preemptions and new owners of a seat. No device."""

from doubles import prompt_request

from jaxllm.runner.logprob_seats import AnswerPlace, LogprobSeats
from jaxllm.scheduling.plan import PlanRow, StepPlan

PROMPT = list(range(100, 110))


def make_row(seat, start=0, num_tokens=10, admitted=False, request=None, **params):
    request = request or prompt_request(str(seat), PROMPT, 5, **params)
    end = start + num_tokens
    return PlanRow(request, seat, start, num_tokens, request.num_known, 0, (), admitted, end >= request.num_tokens)


def test_answers_are_wanted_of_rows_that_sample_until_the_seat_has_another_owner():
    seats = LogprobSeats()
    rows = (make_row(3, admitted=True, logprobs=4), make_row(1, admitted=True), make_row(2, 0, 5, True, logprobs=0))
    plan = StepPlan(rows)
    assert seats.wanted_answers(plan) == {}
    seats.note(plan)
    assert seats.wanted_answers(plan) == {0: 4}, "the last row does not sample"
    assert seats.wanted_answers(StepPlan((make_row(2, 5, 5), make_row(3, 10, 1)))) == {0: 0, 1: 4}
    seats.note(StepPlan((make_row(3, admitted=True),)))
    assert seats.wanted_answers(StepPlan((make_row(3),))) == {}


def test_parts_of_prompts_are_where_their_tokens_are():
    seats = LogprobSeats()
    request = prompt_request("scored", PROMPT, 5, prompt_logprobs=2)
    first = StepPlan((make_row(0, admitted=True), make_row(5, 0, 4, True, request), make_row(1, admitted=True)))
    seats.note(first)
    (part,) = seats.wanted_prompts(first)
    assert (part.row, part.first, part.position, part.num_top) == (1, 10, 1, 2)
    assert part.token_ids == tuple(PROMPT[1:5])
    (part,) = seats.wanted_prompts(StepPlan((make_row(5, 4, 5, request=request),)))
    assert (part.position, part.token_ids) == (5, tuple(PROMPT[5:10]))
    seats.note(first)
    (part,) = seats.wanted_prompts(StepPlan((make_row(0, 10, 1), make_row(5, 8, 2, request=request))))
    assert (part.first, part.token_ids) == (1, (PROMPT[9],)), "behind the last token the answer begins"
    assert seats.wanted_prompts(StepPlan((make_row(5, 10, 1, request=request),))) == []


def test_a_prompts_last_token_alone_scores_nothing_and_may_begin_several_steps():
    seats, request = LogprobSeats(), prompt_request("scored", PROMPT, 5, prompt_logprobs=2)
    seats.note(StepPlan((make_row(5, 0, 9, True, request),)))
    assert seats.wanted_prompts(StepPlan((make_row(5, 9, 1, request=request),))) == []


def test_of_those_who_ask_for_much_the_places_are_wanted():
    seats = LogprobSeats()
    rows = (
        make_row(3, admitted=True, logprobs=21),
        make_row(1, admitted=True, logprobs=20),
        make_row(2, 0, 5, True, logprobs=-1),
        make_row(4, 0, 10, True, logprobs=-1),
    )
    plan = StepPlan(rows)
    seats.note(plan)
    assert seats.wanted_answers(plan) == {1: 20}
    assert seats.wanted_places(plan) == [AnswerPlace(0, 9, 21), AnswerPlace(3, 34, -1)], "row 2 does not sample"
    later = StepPlan((make_row(1, 10, 1), make_row(2, 5, 5)))
    assert seats.wanted_places(later) == [AnswerPlace(1, 5, -1)]
    seats.note(
        StepPlan((make_row(2, admitted=True, logprobs=3), make_row(3, admitted=True), make_row(4, admitted=True)))
    )
    assert seats.wanted_places(plan) == [] and seats.wanted_answers(later) == {0: 20, 1: 3}


def test_a_preempted_prompt_is_scored_again_unless_it_was_done():
    seats = LogprobSeats()
    request = prompt_request("scored", PROMPT, 5, prompt_logprobs=2)
    again = StepPlan((make_row(2, 0, 10, True, request),))
    seats.note(StepPlan((make_row(5, 0, 4, True, request),)))
    seats.note(again)
    assert seats.wanted_prompts(again)[0].token_ids == tuple(PROMPT[1:])
    request.append_tokens([7], [-1.0])
    seats.note(again)
    assert seats.wanted_prompts(again) == []


def test_a_fork_leaves_the_prompt_to_its_parent():
    seats, request = LogprobSeats(), prompt_request("a", PROMPT, 5, prompt_logprobs=2, n=2)
    request.fork({"1_a": 1})
    (child,) = request.children
    assert request.prompt_details == [] and child.prompt_details is None
    plan = StepPlan((make_row(0, 9, 1, True, child),))
    seats.note(plan)
    assert seats.wanted_prompts(plan) == []
