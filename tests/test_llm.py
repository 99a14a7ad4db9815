"""`LLM` and `LLMEngine` as a user calls them: forms of prompts, outputs, stopping, mistakes, cleaning up."""

import dataclasses
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from tiny_model import CONTEXT, VOCAB, write_model

from jaxllm import LLM, SamplingParams
from jaxllm.engine.interrupts import note_interrupt
from jaxllm.runner.pending_step import PendingStep

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), max_num_seqs=8, compilation_cache=False) as llm:
        yield llm
        assert llm.engine.core.scheduler.kv.num_used_blocks == 0, "a test leaked blocks"


def text_of(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.smoke
def test_forms_of_prompts(llm):
    [from_text] = llm.generate("hello", GREEDY)
    token_ids = llm.get_tokenizer().encode("hello")
    assert from_text.prompt == "hello" and from_text.prompt_token_ids == token_ids
    forms = [token_ids, [token_ids], ["hello"], {"prompt": "hello"}, [{"prompt_token_ids": token_ids}]]
    for form in forms:
        [output] = llm.generate(form, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == from_text.outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [f"{'x' * (index % 5)} {index}" for index in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + 7 * index % 11, ignore_eos=True) for index in range(20)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [param.max_tokens for param in params]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    alone = [llm.generate(prompt, param)[0].outputs[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [answer.token_ids for answer in alone] == [output.outputs[0].token_ids for output in outputs]
    assert outputs[0].outputs[0].cumulative_logprob < 0


def test_chat_uses_the_template(llm):
    conversation = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(conversation, GREEDY)
    assert output.outputs[0].text == text_of(llm.generate("user: hello\nassistant:", GREEDY))[0]
    assert text_of(llm.chat([conversation, conversation], GREEDY)) == [output.outputs[0].text] * 2


def test_stop_tokens_stop_strings_and_min_tokens(llm):
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [full] = llm.generate("hello", long)
    answer = full.outputs[0]
    fifth = answer.token_ids[4]
    first = answer.token_ids.index(fifth)
    [stopped] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[fifth]))
    assert stopped.outputs[0].token_ids == answer.token_ids[: first + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", fifth)
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[fifth], min_tokens=12)
    [late] = llm.generate("hello", params)
    assert len(late.outputs[0].token_ids) > 12 and fifth not in late.outputs[0].token_ids[:12]
    piece = answer.text[6:8]
    [cut] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, stop=piece))
    assert cut.outputs[0].text == answer.text[: answer.text.index(piece)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", piece)


def test_seeds(llm):
    warm = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    seeded = SamplingParams(seed=5, **warm)
    [alone] = llm.generate("hello", seeded)
    crowd = llm.generate(["a", "hello", "b", "hello"], [SamplingParams(**warm), seeded] * 2)
    assert crowd[1].outputs[0].token_ids == crowd[3].outputs[0].token_ids == alone.outputs[0].token_ids
    [one], [other] = llm.generate("hello", SamplingParams(**warm)), llm.generate("hello", SamplingParams(**warm))
    assert one.outputs[0].token_ids != other.outputs[0].token_ids


def test_nothing_compiles_after_ready(llm):
    """200 random requests: every shape, every sampling parameter, joining and leaving at random."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 16, 40, 120]))] for _ in range(200)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.7, 1.5]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            min_tokens=rng.choice([0, 3]),
            max_tokens=rng.randrange(3, 30),
            seed=rng.choice([None, -1, 2**70]),
            stop=rng.choice([(), ("e",)]),
        )
        for _ in prompts
    ]
    outputs = llm.generate(prompts, params)
    assert all(output.finished for output in outputs)
    assert llm.engine.core.runner.num_compiles_since_ready == 0


def test_compile_counter_counts(llm):
    before = llm.engine.core.runner.num_compiles_since_ready
    jax.jit(lambda x: x * 3.25 + before)(1.0)
    assert llm.engine.core.runner.num_compiles_since_ready > before
    llm.engine.core.runner.compiled_at_ready += llm.engine.core.runner.num_compiles_since_ready - before


BAD_PROMPTS = {
    "empty": ("", "prompt is empty"),
    "too long": ([1] * CONTEXT, f"prompt has {CONTEXT} tokens, but max_model_len={CONTEXT}"),
    "beyond the vocabulary": ([5, VOCAB], f"prompt holds {VOCAB} at position 1"),
    "negative": ([-1], "prompt holds -1 at position 0"),
    "no token": ([1, "x"], "prompt holds 'x' at position 1"),
    "nothing": (None, "prompt=None is neither text"),
    "another dictionary": ({}, "is neither text"),
    "unknown key": ({"prompt": "x", "multi_modal_data": {}}, "prompt has the key 'multi_modal_data'"),
    "bytes": (b"x", "is neither text"),
    "half a character": ("\ud800", "prompt is not valid Unicode"),
    "half a character for salt": ({"prompt": "x" * 40, "cache_salt": "\ud800"}, "cache_salt is not valid Unicode"),
}


def test_token_ids_count_where_a_prompt_has_both(llm):
    [output] = llm.generate({"prompt": "what the caller calls it", "prompt_token_ids": [5, 6]}, GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("what the caller calls it", [5, 6])
    [same] = llm.generate({"prompt": None, "prompt_token_ids": [5, 6]}, GREEDY)
    assert same.prompt is None and same.outputs[0].token_ids == output.outputs[0].token_ids


def test_numpys_numbers_are_as_good(llm):
    params = SamplingParams(seed=5, n=2, max_tokens=4, stop_token_ids=[7, 8], allowed_token_ids=[7, 8, 9])
    [expected] = llm.generate([5, 6], params)
    arrays = {"stop_token_ids": np.array([7, 8]), "allowed_token_ids": np.array([7, 8, 9])}
    for form in (np.array([5, 6]), [np.array([5, 6])], iter([[5, 6]])):
        [output] = llm.generate(form, dataclasses.replace(params, seed=np.int64(5), max_tokens=np.int8(4), **arrays))
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
        assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize("prompts", [None, 5])
def test_no_prompts_at_all(llm, prompts):
    with pytest.raises(ValueError, match=f"prompts={prompts} is not valid"):
        llm.generate(prompts)


@pytest.mark.parametrize("request_id", ["\ud800", 5])
def test_a_bad_request_id(llm, request_id):
    with pytest.raises(ValueError, match="request_id"):
        llm.engine.add_request(request_id, "hello", GREEDY)


def test_half_a_character_in_other_texts(llm):
    with pytest.raises(ValueError, match="messages is not valid Unicode"):
        llm.chat([{"role": "\ud800", "content": "hello"}], GREEDY)
    with pytest.raises(ValueError, match="bad_words is not valid Unicode"):
        llm.generate("hello", SamplingParams(bad_words=["\ud800"]))


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_named_and_hurts_nobody(llm, name):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", prompt], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.add_request("other", "hello", GREEDY)
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("bad", prompt, GREEDY)
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    assert outputs[0].request_id == "other" and outputs[0].finished
    assert len(outputs[0].outputs[0].token_ids) == GREEDY.max_tokens


def test_one_list_of_parameters_for_another_number_of_prompts(llm):
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_request_id_in_use(llm):
    llm.engine.add_request("twice", "hello", GREEDY)
    with pytest.raises(ValueError, match="request_id='twice' is in use"):
        llm.engine.add_request("twice", "hello", GREEDY)
    assert llm.engine.abort_request("twice").outputs[0].finish_reason == "abort"
    assert llm.engine.abort_request("twice") is None


def test_more_stop_tokens_than_can_be_held_back(llm):
    params = SamplingParams(min_tokens=1, stop_token_ids=range(40))
    with pytest.raises(ValueError, match="min_tokens=1 has to hold back 40 stop tokens"):
        llm.generate("hello", params)


def test_abort_frees_blocks_in_the_middle(llm):
    engine = llm.engine
    for index in range(12):
        engine.add_request(f"abort-{index}", [index + 1] * 40, SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(5):
        engine.step()
    partial = engine.abort_request("abort-0")
    assert partial.finished and partial.outputs[0].finish_reason == "abort" and partial.outputs[0].token_ids
    for index in range(1, 12):
        engine.abort_request(f"abort-{index}")
    assert engine.core.scheduler.kv.num_used_blocks == 0 and not engine.has_unfinished_requests()
    assert engine.step() == []


def test_threads_take_turns(llm):
    prompts = [[1 + index] * 20 for index in range(20)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda index: llm.generate(prompts[index::4], GREEDY), range(4)))
    for index, outputs in enumerate(parts):
        assert [output.outputs[0].token_ids for output in outputs] == expected[index::4]


def test_an_interrupted_generate_leaves_nothing_behind(llm, monkeypatch):
    """A real Ctrl-C, in the middle of a step: it counts after the step, and the engine goes on."""
    steps = iter(range(3))
    launch = llm.engine.core.runner.launch

    def interrupted_launch(plan):
        if next(steps, None) is None:
            signal.raise_signal(signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(llm.engine.core.runner, "launch", interrupted_launch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=50, ignore_eos=True))
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) <= 8


def test_an_interrupt_in_the_middle_of_a_step_never_changes_tokens(folder, monkeypatch):
    """Blocks of a plan that was never launched count as computed: nobody may find them in the prefix cache."""
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=64, enforce_eager=True) as llm:
        prompt, kv = list(range(1, 41)), llm.engine.core.scheduler.kv
        expected = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids

        def interrupted_at(place, name):
            def interrupt(*_):
                monkeypatch.undo()
                raise KeyboardInterrupt

            llm.reset_prefix_cache()
            monkeypatch.setattr(place, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt, GREEDY)

        interrupted_at(PendingStep, "result")
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == expected
        for place, name in ((llm.engine.answers, "process"), (kv, "take_moves")):
            llm.engine.core._end = None
            interrupted_at(place, name)
            with pytest.raises(RuntimeError, match="KeyboardInterrupt came in the middle of a step"):
                llm.generate(prompt, GREEDY)


def test_ctrl_c_stays_ignored_where_it_was():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with note_interrupt() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted.is_set()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_failed_step_is_said_ever_after(folder, monkeypatch):
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=16, compilation_cache=False) as llm:

        def fail(plan):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(llm.engine.core.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate("hello", GREEDY)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="the engine cannot go on: out of memory"):
            llm.generate("hello", GREEDY)
    with pytest.raises(RuntimeError, match="the engine cannot go on"):
        llm.generate("hello", GREEDY)
    llm.close()


SCRIPT = """
import sys
from jaxllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=2, max_num_batched_tokens=16, compilation_cache=False)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
llm.engine.add_request("left running", "hello", params)
llm.engine.step()
print("done")
"""


def test_a_script_that_leaves_a_step_running_ends_well(folder):
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


BAD_FIELDS = {
    "unknown field": ({"max_model_length": 5}, TypeError, "max_model_length"),
    "block_size": ({"block_size": 24}, ValueError, "block_size=24 is not a power of two"),
    "max_model_len": ({"max_model_len": 1000}, ValueError, "max_model_len=1000 is not between"),
    "cache too small": ({"num_gpu_blocks_override": 5}, ValueError, "lower max_model_len to at most 64"),
    "bytes too few": ({"kv_cache_memory_bytes": 1000}, ValueError, "raise kv_cache_memory_bytes"),
    "budget": ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, ValueError, "max_num_batched_tokens=4 is below"),
    "tensor_parallel_size": ({"tensor_parallel_size": 4}, ValueError, "this model works with 1, 2, 3"),
    "too many devices": ({"tensor_parallel_size": 9}, ValueError, "needs 9 devices"),
    "device": ({"device": "cuda:0"}, ValueError, "device='cuda:0' is not available"),
    "dtype": ({"dtype": "int4"}, ValueError, "dtype='int4' is unknown"),
    "attention_backend": ({"attention_backend": "pallas"}, ValueError, "attention_backend='pallas' needs a GPU"),
    "batch_invariant": ({"batch_invariant": True}, ValueError, "batch_invariant=True needs a GPU"),
    "batch_invariant, no flag": ({"batch_invariant": 1}, ValueError, "batch_invariant=1 has the wrong type"),
    "enforce_eager": ({"enforce_eager": "no"}, ValueError, "enforce_eager='no' has the wrong type"),
    "compilation_cache": ({"compilation_cache": "off"}, ValueError, "compilation_cache='off' has the wrong type"),
    "seed": ({"seed": "x"}, ValueError, "seed='x' has the wrong type"),
    "utilization": ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization=1.5"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_bad_field_is_named(folder, name):
    fields, error, message = BAD_FIELDS[name]
    with pytest.raises(error, match=message):
        LLM(str(folder), **fields)


def test_unknown_model():
    with pytest.raises(ValueError, match="smollm3-135m"):
        LLM("smollm3-135m")


def test_close_frees_device_memory(folder):
    before = sum(array.nbytes for array in jax.live_arrays())
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=16, compilation_cache=False) as llm:
        llm.generate("hello", GREEDY)
        assert sum(array.nbytes for array in jax.live_arrays()) > before + 3e5
    assert sum(array.nbytes for array in jax.live_arrays()) < before + 1e5
