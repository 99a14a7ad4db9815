"""What an engine is told at its start about logits and sampling: processors, and the model's generation_config.json."""

import json
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import VOCAB, write_model
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from jaxllm import LLM, LLMEngine, SamplingParams
from jaxllm.engine.start import make_progress_lock

OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "compilation_cache": False, "dtype": "float32"}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 7, "do_sample": True, "eos_token_id": 269}


def only_even_tokens(logits):
    return jnp.where(jnp.arange(VOCAB) % 2 == 0, logits, -jnp.inf)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("start") / "tiny")
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


def test_processors_and_defaults(folder, caplog):
    caplog.set_level(logging.INFO)
    with LLM(str(folder), logits_processors=["test_engine_start:only_even_tokens", jnp.tanh], **OPTIONS) as llm:
        said = [record.message for record in caplog.records if "generation_config" in record.message]
        assert len(said) == 1 and "temperature=0.6, top_p=0.95, top_k=20, max_tokens=7" in said[0]
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=7)
        (answer,) = llm.generate("hello")[0].outputs
        assert len(answer.token_ids) <= 7
        params = [SamplingParams(temperature=0, max_tokens=20), SamplingParams(seed=1, max_tokens=20, top_k=40)]
        for output in llm.generate(["hello", "world"], params):
            assert not any(np.array(output.outputs[0].token_ids) % 2)


BAD = [
    ({"logits_processors": "x"}, "logits_processors='x' is not valid: use a list of functions"),
    ({"logits_processors": [3]}, "logits_processors has 3: use functions"),
    ({"logits_processors": ["no_such_module:f"]}, "'no_such_module:f' cannot be imported"),
    ({"logits_processors": ["math.exp"]}, 'cannot be imported: .*write "package.module:function"'),
    ({"logits_processors": [lambda logits: logits[0]]}, "it has to return float32 logits of the shape it got"),
    ({"logits_processors": [lambda: 0]}, r"fails on float32 logits \[rows, vocab\]"),
    ({"generation_config": "vllm"}, "generation_config='vllm' is unknown: use one of auto, none"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_used_is_named(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        LLMEngine(str(folder), **OPTIONS, **fields)


def test_ctrl_c_leaves_no_progress_bar_locked(monkeypatch):
    """Else the threads that compile would wait for ever, and the process with them."""
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    monkeypatch.setattr(TqdmDefaultWriteLock, "mp_lock", None, raising=False)
    monkeypatch.setattr(TqdmDefaultWriteLock, "create_mp_lock", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        make_progress_lock()
        time.sleep(5)  # the signal comes a little later
    with ThreadPoolExecutor(1) as pool:
        lock = TqdmDefaultWriteLock.th_lock
        assert pool.submit(lambda: lock.acquire(timeout=5) and lock.release() is None).result(), "it is locked"
