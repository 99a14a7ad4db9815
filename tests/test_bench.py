"""`jaxllm bench`: workloads, what is timed, figures, and the JSON."""

import dataclasses
import json
import random
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.bench import attention, latency, runs, sampling, startup
from jaxllm.bench.report import Figure, Report
from jaxllm.bench.settings import (
    Extent,
    KernelSettings,
    LatencySettings,
    Mixture,
    StartupSettings,
    ThroughputSettings,
)
from jaxllm.bench.throughput import measure_throughput
from jaxllm.bench.workloads import Workload, nano, random_prompt, same_length, shared_prefix
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serving import cli
from jaxllm.serving.cli_commands import BenchLatency

FIELDS = {"model": "tiny-llama", "load_format": "dummy", "max_model_len": 128, "max_num_seqs": 4}
FIELDS |= {"max_num_batched_tokens": 32}  # for few executables, as compiling them takes longest
FLAGS = ["--load-format", "dummy", "--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
SIZES = ThroughputSettings(num_prompts=4, longest=12, prefix_len=20, own_len=4, output_len=3, prefill_len=16)
LATENCY = LatencySettings(rows=(1, 3), context=16, steps=5, prompt_len=8, rounds=2)
KERNELS = KernelSettings(
    decode=(Extent(3, 40),),
    chunk=(40,),
    mixed=(Mixture(3, 40, 2, 10),),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    sampler_rows=3,
    vocab_size=300,
)


@pytest.fixture(scope="module")
def llm():
    with LLM(**FIELDS) as made:
        yield made


def test_nano_is_exactly_nano_vllms_benchmark():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    output_lens = [random.randint(100, 1024) for _ in range(256)]
    workload = nano()
    assert (workload.prompts, workload.output_lens) == (prompts, output_lens)
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)


def test_variants_have_the_same_lengths_and_no_common_prefix():
    first, second = nano(16), nano(16, variant=1)
    assert list(map(len, first.prompts)) == list(map(len, second.prompts))
    assert first.output_lens == second.output_lens
    assert all(one[0] != other[0] for one, other in zip(first.prompts, second.prompts, strict=True))
    assert max(max(prompt) for prompt in nano(16, vocab_size=300).prompts) == 299


def test_shared_prefix():
    prefix = random_prompt(5, 100, seed=1)
    workload = shared_prefix(prefix, same_length(3, 2, 7, 100, seed=2))
    assert [prompt[:5] for prompt in workload.prompts] == [prefix] * 3
    assert len({tuple(prompt[5:]) for prompt in workload.prompts}) == 3
    assert list(workload.output_lens) == [7, 7, 7]


class ScriptedEngine:
    """Each step takes the seconds and gives every request the number of tokens that are written down."""

    def __init__(self, steps, monkeypatch):
        self.steps, self.now, self.lengths = list(steps), 0.0, {}
        self.config = SimpleNamespace(max_model_len=10)
        monkeypatch.setattr(latency.time, "perf_counter", lambda: self.now)

    def add_request(self, request_id, prompt, params):
        self.lengths[request_id] = 0

    def has_unfinished_requests(self):
        return bool(self.steps)

    def step(self):
        seconds, new = self.steps.pop(0)
        self.now += seconds
        outputs = []
        for request_id, count in zip(self.lengths, new, strict=True):
            self.lengths[request_id] += count
            answer = CompletionOutput(0, "", [0] * self.lengths[request_id], 0.0)
            outputs += [RequestOutput(request_id, None, [], [answer])] if count else []
        return outputs


WORKLOAD = Workload([[1], [2]], [9, 9])


def test_only_steps_in_which_all_rows_decode_are_timed(monkeypatch):
    monkeypatch.setattr(latency, "SETTLING", 1)
    steps = [(9, (1, 0)), (9, (1, 1)), (1, (1, 1)), (2, (1, 1)), (3, (1, 1)), (9, (1, 0))]
    engine = ScriptedEngine(steps, monkeypatch)
    assert latency.decode_seconds(engine, WORKLOAD, 2) == [2, 3]


def test_step_that_brings_several_tokens_counts_as_several(monkeypatch):
    monkeypatch.setattr(latency, "SETTLING", 0)
    engine = ScriptedEngine([(9, (1, 1)), (8, (4, 4)), (1, (1, 1))], monkeypatch)
    assert latency.decode_seconds(engine, WORKLOAD, 5) == [2, 2, 2, 2, 1]


def test_rows_that_do_not_fit_together_are_an_error(monkeypatch):
    engine = ScriptedEngine([(1, (1, 0))] * 30, monkeypatch)
    with pytest.raises(ValueError, match=r"rows=2: 0 of 9 steps .* lower rows"):
        latency.decode_seconds(engine, WORKLOAD, 1)


def test_rows_that_outgrow_the_context_are_another_error(monkeypatch):
    engine = ScriptedEngine([(1, (1, 0))] * 30, monkeypatch)
    engine.config.max_model_len = 9
    with pytest.raises(ValueError, match="prompt and answer need 10 tokens, but max_model_len=9: lower rows, context"):
        latency.decode_seconds(engine, WORKLOAD, 1)


def test_latency(llm):
    figures = list(latency.measure_latency(llm.engine, LATENCY))
    assert [figure.name for figure in figures] == [
        "decode step, context 16, 1 row",
        "decode step, context 16, 3 rows",
        "one stream, prompt 8, per token",
        "time to first token, prompt 8",
    ]
    for figure in figures:
        assert figure.unit == "ms"
        assert 0 < figure.details.get("min_ms", 0) <= figure.value or "min_ms" not in figure.details
    assert figures[0].details["p90_ms"] >= figures[0].value
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rows": (5,)}, "rows=5 is above max_num_seqs=4"), ({"context": 128}, "max_model_len=128")],
)
def test_latency_that_cannot_be_measured(llm, changes, message):
    with pytest.raises(ValueError, match=message):
        list(latency.measure_latency(llm.engine, dataclasses.replace(LATENCY, **changes)))
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("sampled", [False, True])
def test_throughput_of_nano(llm, sampled):
    settings = dataclasses.replace(SIZES, sampled=sampled)
    (figure,) = measure_throughput(llm, settings)
    kind = "sampled" if sampled else "greedy"
    assert figure.name == f"4 requests of nano-vllm's benchmark, {kind}, up to 12 tokens"
    assert figure.value == pytest.approx(4 * 12 / figure.details["seconds"], rel=0.01)
    expected = {"requests": 4, "prompt_tokens": 48, "output_tokens": 48, "preemptions": 0}
    assert expected.items() <= figure.details.items()
    assert figure.details["steps"] >= 12
    assert 0 <= figure.details["padding_share"] < 1


def test_padding_is_counted(llm):
    """One prompt of 16 tokens and 3 tokens of answer: a mixed step, and two decode steps of one row."""
    counts = llm.engine.core.runner.counts
    before, ladder = counts.values, llm.engine.core.runner.programs.ladder
    llm.generate([[1] * 16], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    new = tuple(after - old for after, old in zip(counts.values, before, strict=True))
    assert new == (3, 16 + 2, ladder.mixed[0].tokens + 2 * ladder.decode[0].tokens)


def test_other_workloads(llm):
    (prefill,) = measure_throughput(llm, dataclasses.replace(SIZES, workload="prefill"))
    assert (prefill.name, prefill.unit) == ("4 prompts of 16 tokens, 1 token each", "prompt tok/s")
    figures = list(measure_throughput(llm, dataclasses.replace(SIZES, workload="shared-prefix")))
    cases = ["prefix new", "prefix cached", "nothing shared"]
    assert [figure.name for figure in figures] == [
        f"4 requests of 20 + 4 tokens, 3 of answer, {case}" for case in cases
    ]
    assert {figure.details["prompt_tokens"] for figure in figures} == {4 * 24}


def test_report_of_everything_and_what_is_kept(capsys, tmp_path):
    report = runs.report_all(FIELDS, LATENCY, SIZES)
    assert [figure.unit for figure in report.figures] == [
        *["ms"] * 4,
        *["output tok/s"] * 2,
        "prompt tok/s",
        *["s"] * 3,
    ]
    assert len(capsys.readouterr().err.splitlines()) == len(report.figures), "each is said when it is there"
    report.write(tmp_path / "new" / "all.json")
    kept = json.loads((tmp_path / "new" / "all.json").read_text())
    assert kept.keys() == {field.name for field in dataclasses.fields(Report)}
    assert kept["model"] == "tiny-llama"
    assert kept["machine"]["device"] == "cpu"
    assert kept["machine"]["count"] == 1
    assert kept["parameters"]["engine"]["max_num_seqs"] == 4
    assert kept["parameters"]["latency"]["rows"] == [1, 3]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", kept["date"])


def test_latency_command(capsys):
    flags = ["--rows", "1,2", "--context", "8", "--steps", "3", "--rounds", "1", "--prompt-len", "9"]
    assert cli.main(["bench", "latency", "tiny-llama", *FLAGS, *flags, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert [figure["unit"] for figure in json.loads(captured.out)["figures"]] == ["ms"] * 4
    assert "decode step, context 8, 2 rows" in captured.err


def test_table_is_on_standard_output_and_json_in_its_file(capsys, tmp_path, monkeypatch):
    figure = Figure("a step", 1234.5, "ms", {"p90_ms": 2.5, "correct": True})
    report = Report("latency", "m", {"device": "GPU", "count": 1, "jax": "1"}, {}, [figure])
    monkeypatch.setattr(runs, "report_latency", lambda fields, settings: report)
    path = tmp_path / "latency.json"
    assert cli.main(["bench", "latency", "m", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"a step +1,234 +ms +p90_ms 2.5, correct True", out)
    assert "m on 1 x GPU, jax 1" in out
    assert json.loads(path.read_text())["figures"][0]["value"] == 1234.5


BAD_COMMANDS = {
    "latency m --rows 0,1": "rows=(0, 1) is too small",
    "latency m --rounds 0": "rounds=0 is too small",
    "throughput m --num-prompts 0": "num_prompts=0 is too small",
    "startup m --rounds 0": "rounds=0 is too small",
    "all m --steps -1": "steps=-1 is too small",
    "latency m --json /dev": "json='/dev' cannot be written, because of /dev",
    "latency m --json /dev/null/x/figures.json": "cannot be written, because of /dev/null: name another file",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_what_is_wrong_is_said_before_anything_is_measured(command, capsys, monkeypatch):
    for name in ("report_latency", "report_throughput", "report_startup", "report_all"):
        monkeypatch.setattr(runs, name, lambda *_: pytest.fail("it was measured"))
    assert cli.main(["bench", *command.split()]) == 2
    assert BAD_COMMANDS[command] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["latency", "throughput", "startup", "kernels", "all"])
def test_help_has_an_example_that_can_be_parsed(name, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", name, "--help"])
    match = re.search(rf"^Example: jaxllm (bench {name}.*)$", capsys.readouterr().out, re.MULTILINE)
    assert match
    command = cli.parse(match[1].split())
    assert type(command.benchmark).__name__ == f"Bench{name.capitalize()}"


def test_flags_of_several_values():
    command = cli.parse(["bench", "latency", "--rows", "1,8", "m"])
    assert isinstance(command.benchmark, BenchLatency)
    assert (command.benchmark.latency.rows, command.benchmark.engine.model) == ((1, 8), "m")
    kernels = cli.parse(["bench", "kernels", "--decode", "8x64,1x7", "--mixed", "8x64+1x7"])
    assert kernels.benchmark.kernels.decode == (Extent(8, 64), Extent(1, 7))
    assert kernels.benchmark.kernels.mixed == (Mixture(8, 64, 1, 7),)


@pytest.mark.parametrize("flags", [["--decode", "8"], ["--decode", "0x8"], ["--chunk", "8,"], ["--mixed", "8x1"]])
def test_mistyped_values(flags, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bench", "kernels", *flags])
    assert exit_info.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_inputs_of_attention_are_poisoned_where_it_must_not_look():
    lens = np.array([5, 16, 33], np.int32)
    inputs = attention.make_inputs(KERNELS, lens, np.array([1, 2, 3], np.int32), seed=0)
    assert inputs.q.shape == (6, 4, 16)
    assert inputs.cu_q_lens.tolist() == [0, 1, 3, 6]
    finite = np.isfinite(np.asarray(inputs.k_cache, np.float32)).all((2, 3))
    assert finite.sum() == lens.sum()
    assert not finite[0].any(), "the null block"
    for row, length in enumerate(lens):
        positions = np.arange(length)
        assert finite[np.asarray(inputs.block_tables)[row, positions // 16], positions % 16].all()
    assert np.isnan(np.asarray(inputs.v_cache, np.float32)).any((2, 3)).sum() == finite.size - lens.sum()


def test_kernels():
    report = runs.report_kernels(KERNELS)
    names = [figure.name for figure in report.figures]
    assert names[:3] == [
        "decode attention, 3 x 40 tokens, 4/2 heads of 16, bfloat16",
        "prompt attention, 40 tokens, 4/2 heads of 16, bfloat16",
        "decode attention, 3 x 40 tokens, beside prompts, 2 x 10 tokens, 4/2 heads of 16, bfloat16",
    ]
    assert names[3:] == [f"sampler, 3 rows of 300, {case}" for case in sampling.CASES]
    for figure in report.figures[:3]:
        assert not figure.is_wrong
        assert 0 < figure.details["relative_error"] < 5e-3, "bfloat16 against float32"
        assert figure.details["backend"] == "xla"
    assert isinstance(report.parameters["kernels"]["seed"], int)


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_wrong_kernel_is_found_out(factor, monkeypatch):
    right = attention.attend

    def wrong(q, *arguments, **options):
        """Only the kernel under test is wrong, not the float32 oracle."""
        result = right(q, *arguments, **options)
        return result if q.dtype == jnp.float32 else result * jnp.asarray(factor, q.dtype)

    monkeypatch.setattr(attention, "attend", wrong)
    attention._attend.clear_cache()
    try:
        (figure,) = attention.measure_attention(dataclasses.replace(KERNELS, chunk=(), mixed=()), seed=1)
    finally:
        attention._attend.clear_cache()
    assert figure.is_wrong
    assert figure.details["relative_error"] == ("NaN" if np.isnan(factor) else pytest.approx(0.01, rel=0.3))


def test_command_fails_where_a_result_is_wrong(monkeypatch, capsys):
    figure = Figure("attention", 4.0, "TB/s", {"relative_error": "NaN", "correct": False})
    report = Report("kernels", None, {"device": "GPU", "count": 1, "jax": "1"}, {}, [figure])
    monkeypatch.setattr(runs, "report_kernels", lambda settings: report)
    assert cli.main(["bench", "kernels", "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["figures"][0]["details"]["correct"] is False
    assert "what was timed gives wrong results: attention" in captured.err


def test_startup(capfd):
    report = runs.report_startup({**FIELDS, "max_num_seqs": 1}, StartupSettings(rounds=1))
    empty, warm = report.figures
    assert empty.name == "process start to first token, caches empty"
    assert warm.name == "process start to first token, caches warm"
    for figure in report.figures:
        parts = sum(figure.details[name] for name in ("imports_s", "engine_s", "answer_s"))
        assert 0 < parts <= figure.value * 1.01
    assert warm.details["engine_s"] < empty.details["engine_s"], "the second start finds what the first compiled"
    assert report.machine["device"] == "cpu"


def test_startup_eager_and_medians(monkeypatch):
    seconds = iter([4, 1, 8, 3, 6, 2, 5, 5, 9])
    asked = []

    def start(fields, cache):
        asked.append((fields.get("enforce_eager", False), cache))
        return startup.Start(next(seconds), {"imports_s": 1.0}, {"device": "GPU"})

    monkeypatch.setattr(startup, "start", start)
    figures, machine = startup.measure_startup(FIELDS, StartupSettings(rounds=3, eager=True))
    assert [figure.value for figure in figures] == [6, 2, 5]
    assert machine == {"device": "GPU"}
    assert [eager for eager, _ in asked] == [False] * 6 + [True] * 3
    folders = [cache for _, cache in asked]
    assert folders[0] == folders[1], "the second start of a round finds the first one's caches"
    assert len({*folders}) == 6


def test_process_that_fails_is_an_error(capfd):
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        startup.start({"model": "nowhere"}, "/nonexistent")
    assert "model='nowhere' is not known" in capfd.readouterr().err
