"""Beam search against transformers, whose hypotheses and scores scripts/make_sampling_golden.py wrote down."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from toy_tokenizers import byte_level

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.engine.beam_search import BeamSearch, Candidate, Hypothesis

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "hf_beams.json").read_text())["llama"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beams") / "tiny"
    shutil.copytree(DATA / "tiny" / "llama", folder)
    byte_level().backend.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), dtype="float32", max_num_seqs=16, max_logprobs=30, compilation_cache=False) as llm:
        yield llm


def make_params(case, **fields):
    return BeamSearchParams(
        beam_width=case["num_beams"],
        max_tokens=case["max_new_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        **fields,
    )


def check(sequences, case):
    assert len(sequences) == len(case["beams"])
    for found, expected in zip(sequences, case["beams"], strict=True):
        assert found.tokens == case["prompt"] + expected["token_ids"]
        assert found.score == pytest.approx(expected["score"], rel=1e-4, abs=1e-4)


def test_hypotheses_and_scores_are_those_of_transformers(llm):
    """All searches at once, each with ends of its own."""
    searches = [
        BeamSearch(case["prompt"], make_params(case), frozenset(case["eos_token_ids"]), case["max_new_tokens"], 20)
        for case in CASES
    ]
    llm._search(searches, [None] * len(searches), use_tqdm=False)
    for search, case in zip(searches, CASES, strict=True):
        check(search.sequences(), case)
    reasons = {one.finish_reason for search in searches for one in search.sequences()}
    assert reasons == {"stop", "length"}, "the cases do not cover both ends"


def test_as_users_call_it(llm):
    cases = [case for case in CASES if case["eos_token_ids"] == [2]][:2]
    for case in cases:
        (output,) = llm.beam_search([{"prompt_token_ids": case["prompt"]}], make_params(case))
        check(output.sequences, case)
        own = output.sequences[0].tokens[len(case["prompt"]) :]
        assert output.sequences[0].text == llm.get_tokenizer().decode(own)
    assert llm.engine.core.runner.num_compiles_since_ready == 0
    hits = llm.engine.core.scheduler.kv.stats().prefix_cache.hits
    llm.beam_search([[*range(5, 55)]], BeamSearchParams(beam_width=3, max_tokens=4))
    new_hits = llm.engine.core.scheduler.kv.stats().prefix_cache.hits - hits
    assert new_hits >= 3 * 3 * 48, "what hypotheses have in common was computed again"


def test_too_many_beams_are_refused(llm):
    message = r"beam_width=16 needs 32 candidates a token with 1 end tokens, .* at most 15, or .* max_logprobs=-1"
    with pytest.raises(ValueError, match=message):
        llm.beam_search([[5, 6]], BeamSearchParams(beam_width=16, max_tokens=4))
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.beam_search("", BeamSearchParams(beam_width=2, max_tokens=4))


def test_more_beams_than_steps_tell_of(llm):
    """15 beams, whose 30 candidates the host finds: sums of the log-probabilities that the same tokens have in a prompt."""
    prompt, before = [5, 6, 7], llm.engine.core.runner.num_compiles_since_ready
    params = BeamSearchParams(beam_width=15, max_tokens=3, ignore_eos=True)
    (output,) = llm.beam_search([prompt], params)
    assert llm.engine.core.runner.num_compiles_since_ready == before
    assert len({tuple(one.tokens) for one in output.sequences}) == 15
    scores = [one.score for one in output.sequences]
    assert scores == sorted(scores, reverse=True)
    scored = llm.generate([one.tokens for one in output.sequences], SamplingParams(max_tokens=1, prompt_logprobs=0))
    for one, told in zip(output.sequences, scored, strict=True):
        own = zip(one.tokens[3:], told.prompt_logprobs[3:], strict=True)
        assert one.cum_logprob == pytest.approx(sum(entries[token].logprob for token, entries in own), abs=1e-4)
    (narrow,) = llm.beam_search([prompt], dataclasses.replace(params, beam_width=4))
    assert narrow.sequences[0].score <= scores[0] + 1e-5, "more beams found less"


def test_no_end_takes_the_place_of_a_hypothesis_that_goes_on():
    search = BeamSearch([1], BeamSearchParams(beam_width=2, max_tokens=3), frozenset({9}), 3, 20)
    search.advance([[Candidate(9, -0.1), Candidate(5, -1.0), Candidate(6, -2.0), Candidate(7, -3.0)]])
    assert search.running == [Hypothesis((5,), -1.0), Hypothesis((6,), -2.0)]
    assert search.finished == [(-0.1, Hypothesis((9,), -0.1))] and not search.is_over
    search.advance([[Candidate(9, -0.5), Candidate(4, -4.0)], [Candidate(9, -9.0), Candidate(4, -9.5)]])
    assert [one.token_ids for _, one in search.finished] == [(9,), (5, 9)]
    assert search.is_over, "-5 by two tokens is less than either answer"
