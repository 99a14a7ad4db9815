"""Reading of profiles: stages, shares of time, bytes and operations, on a GPU's profile that was made by hand."""

import dataclasses
import json

import gpu_trace
import pytest
from gpu_trace import (
    FACTS,
    HLO,
    LAYER_WEIGHTS,
    LLAMA_8B,
    PROGRAM,
    SIZES,
    STAGE_US,
    STEP_US,
    Event,
    make_steps,
    to_planes,
)
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.model_config import LayerKind
from jaxllm.profiling.attribution import Programs
from jaxllm.profiling.hlo import Operation, read_operations
from jaxllm.profiling.program_order import ProgramOrder
from jaxllm.profiling.report import write_report
from jaxllm.profiling.scopeless import infer_stages
from jaxllm.profiling.session_facts import SessionFacts
from jaxllm.profiling.spans import intersect, length, shares, subtract, union
from jaxllm.profiling.stages import common_stage, layer_of, stage_of, without_layer
from jaxllm.profiling.summarize import Session, summarize
from jaxllm.profiling.tables import make_tables, to_text
from jaxllm.profiling.trace import DeviceEvent, read_trace
from jaxllm.profiling.work import Load, Sizes, work_of


def summary_of(folder, text, facts=FACTS):
    return summarize(Session.of(read_trace(gpu_trace.write(folder, text)), facts))


def stage_ms(bucket):
    return {stage.name: pytest.approx(stage.ms, abs=1e-9) for stage in bucket.stages}


@pytest.mark.parametrize(
    ("op_name", "stage"),
    [
        ("jit(decode_64)/layer_07/jit(_run_layer)/attention/dot_general", "layer_07/attention"),
        (
            "jit(step)/while/body/layer_00/attention/paged_attention/while/body/sub",
            "layer_00/attention/paged_attention",
        ),
        ("jit(decode_1)/sample/cond/branch_1_fun/add", "sample"),
        ("layer_31/jit(_run_layer)/mlp", "layer_31/mlp"),
        ("jit(decode_64)/while/body/closed_call", None),
        ("reduce_sum", None),
        ("", None),
    ],
)
def test_stages_are_read_off_scopes(op_name, stage):
    assert stage_of(op_name) == stage


def test_layers_of_stages():
    assert without_layer("layer_07/attention/write_kv") == "attention/write_kv"
    assert without_layer("layer_07") == "other"
    assert layer_of("layer_07/mlp") == 7
    assert layer_of("head") is None


def test_operations_of_a_program():
    operations = read_operations(HLO)
    assert operations["gemm.2"] == Operation("custom-call", "layer_01/mlp")
    assert operations["norm-fusion.1"] == Operation("fusion", "layer_00/mlp"), "most of what was fused"
    assert operations["copy.9"] == Operation("copy", "sample"), "that of its loop"
    assert operations["while.1"].opcode == "while"
    assert operations["copy.1"] == Operation("copy", None)
    assert not {"mul.1", "x", "tuple.9"} & operations.keys(), "fused, or never run"


def test_operations_without_scopes_are_of_the_stage_around_them():
    """As in what XLA makes of a layer for one row on a CPU, where products have lost their scopes."""

    def scope(path):
        return f'metadata={{op_name="jit(decode_1)/{path}/add"}}'

    layer, following = "layer_00/jit(_run_layer)", "layer_01/jit(_run_layer)"
    operations = read_operations(f"""\
%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]{{0}}) parameter(0)
  %inner.1 = f32[8]{{0}} copy(%b)
  ROOT %tuple.9 = (s32[], f32[8]{{0}}) tuple(%b, %inner.1)
}}

ENTRY %main (x: f32[8], w: f32[8,8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %w = f32[8,8]{{1,0}} parameter(1)
  %norm.1 = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%f, {scope(layer + "/attention")}
  %bitcast.1 = f32[8]{{0}} bitcast(%norm.1)
  %qkv = f32[8]{{0}} dot(%bitcast.1, %w), lhs_contracting_dims={{0}}
  %write = f32[8]{{0}} fusion(%qkv), kind=kLoop, calls=%f, {scope(layer + "/attention/write_kv")}
  %into = f32[8]{{0}} copy(%x)
  %tuple.1 = (s32[], f32[8]{{0}}) tuple(%into, %w)
  %while.1 = (s32[], f32[8]{{0}}) while(%tuple.1), condition=%c, body=%body, {scope(layer + "/attention/paged_attention")}
  %paged = f32[8]{{0}} get-tuple-element(%while.1), index=1
  %out = f32[8]{{0}} dot(%paged, %w), lhs_contracting_dims={{0}}
  %norm.2 = f32[8]{{0}} fusion(%out, %x), kind=kLoop, calls=%f, {scope(layer + "/mlp")}
  %down = f32[8]{{0}} dot(%norm.2, %w), lhs_contracting_dims={{0}}
  %norm.3 = f32[8]{{0}} fusion(%down), kind=kLoop, calls=%f, {scope(following + "/attention")}
  %between = f32[8]{{0}} add(%norm.3, %down)
  %counter = s32[] add(%x, %x)
  ROOT %last = (f32[8]{{0}}, s32[]) custom-call(%between, %counter), {scope("head")}
}}
""")
    assert {name: operation.stage for name, operation in operations.items()} == {
        "inner.1": "layer_00/attention/paged_attention",
        "norm.1": "layer_00/attention",
        "qkv": "layer_00/attention",  # not of write_kv, which takes it
        "write": "layer_00/attention/write_kv",
        "into": "layer_00/attention/paged_attention",  # of the loop that takes it
        "while.1": "layer_00/attention/paged_attention",
        "out": "layer_00/attention",  # of the attention it takes, but no part of the loop
        "norm.2": "layer_00/mlp",
        "down": "layer_00/mlp",  # not of the next layer, which takes it
        "norm.3": "layer_01/attention",
        "between": "head",  # what it takes is of two stages
        "counter": "head",
        "last": "head",
    }


def test_operations_between_several_stages_have_none():
    operations = {"a": [], "b": [], "both": ["a", "b"], "c": ["both"], "d": ["both"]}
    stages: dict[str, str | None] = {"a": "embed", "b": "head", "both": None, "c": "sample", "d": "prepare"}
    infer_stages(operations, stages)
    assert stages["both"] is None
    assert common_stage(["layer_00/mlp", "layer_00/attention"]) is None, "a layer is no stage"
    assert common_stage([None, "layer_00"]) is None


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


@given(SPANS, SPANS)
def test_spans_against_sets_of_moments(first, second):
    def moments(spans):
        return {moment for start, end in spans for moment in range(start, end)}

    one, other = union(first), union(second)
    assert moments(one) == moments(first)
    assert length(one) == len(moments(first))
    assert moments(intersect(one, other)) == moments(first) & moments(second)
    assert moments(subtract(one, other)) == moments(first) - moments(second)


@given(SPANS, st.data())
def test_shares_add_up_to_the_busy_time(spans, data):
    containers = data.draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    owned = shares(spans, containers)
    assert sum(owned) == pytest.approx(length(union(spans)))
    assert all(0 <= share <= end - start + 1e-9 for share, (start, end) in zip(owned, spans, strict=True))


def test_what_runs_at_once_shares_and_a_loop_has_the_rest():
    assert shares([(0, 10), (5, 15)], [False, False]) == [7.5, 7.5]
    assert shares([(0, 100), (10, 60), (20, 30)], [True, True, False]) == [50, 40, 10]


def test_four_ways_to_find_a_stage():
    def event(start, name="nvjet", operation="", scope="", module=PROGRAM):
        return DeviceEvent(start, start + 1, name, module, operation, scope)

    events = [
        event(0, operation="gemm.1"),
        event(1, operation="unheard.1", scope="layer_01/jit(_run_layer)/attention/mul"),
        event(2, name="norm_fusion_7"),
        event(3, operation="gemm.2"),
        event(4, operation="copy.1"),
        event(5, operation="gemm.2"),
        event(6, operation="copy.1"),
        event(7, operation="gemm.3"),
        event(8, name="MemcpyD2H", module=""),
    ]
    found = [one.stage for one in Programs(FACTS.operations).attribute(events[::-1])]
    own = ["layer_00/attention", "layer_01/attention", "layer_00/mlp", "layer_01/mlp", "layer_01/mlp", "layer_01/mlp"]
    assert found == [*own, "other", "head", "other"]


def test_the_stages_add_up_to_the_step(tmp_path):
    device, host = make_steps(calls=6)
    copies = [Event("MemcpyH2D", call * STEP_US + 190, 5) for call in range(6)]
    summary = summary_of(tmp_path, to_planes(device, host, copies), dataclasses.replace(FACTS, unprofiled_step_ms=0.95))
    (bucket,) = summary.buckets
    assert (summary.steps, bucket.calls, bucket.steps) == (6, 6, 6)
    assert stage_ms(bucket) == {name: time / 1e3 for name, time in {**STAGE_US, "other": 5}.items()}
    tops = [stage for stage in bucket.stages if "/" not in stage.name]
    assert sum(stage.ms for stage in tops) == pytest.approx(bucket.busy_ms)
    assert sum(stage.share for stage in tops) + bucket.idle_ms / bucket.step_ms == pytest.approx(1, rel=0.05)
    assert bucket.step_ms == pytest.approx(1.0)
    assert bucket.busy_ms == pytest.approx(0.905)
    assert bucket.accounted == pytest.approx(1, rel=0.05)
    assert bucket.layers == {"attention": pytest.approx([0.3]), "mlp": pytest.approx([0.03, 0.3])}
    assert summary.unprofiled_step_ms == 0.95


def test_several_steps_of_a_call_are_counted_as_steps(tmp_path):
    device, host = make_steps(calls=5, steps=4)
    (bucket,) = summary_of(tmp_path, to_planes(device, host)).buckets
    assert (bucket.calls, bucket.steps) == (5, 20)
    assert stage_ms(bucket) == {name: time / 1e3 for name, time in STAGE_US.items()}
    assert bucket.step_ms == pytest.approx(1.0)
    assert bucket.load == Load(1, 64, 64, 64 * 512, 64 * 512, 64)


def test_within_a_cuda_graph_names_of_kernels_have_to_do(tmp_path):
    device, host = make_steps(calls=3)
    (bucket,) = summary_of(tmp_path, to_planes(gpu_trace.in_graph(device), host)).buckets
    # The last one is a library's in a loop, where nothing follows that has a name.
    expected = {name: time / 1e3 for name, time in STAGE_US.items() if name not in ("sample", "head", "mlp")}
    found = stage_ms(bucket)
    assert {name: found[name] for name in expected} == expected
    assert found["mlp"] == 0.03
    assert sum(stage.ms for stage in bucket.stages if "/" not in stage.name) == pytest.approx(0.9)


def test_kernels_without_operations_are_told_by_their_order():
    layers = {
        f"{name}.{layer}": Operation(opcode, f"layer_{layer:02d}/{stage}")
        for layer in range(3)
        for name, opcode, stage in (
            ("norm_fusion", "fusion", "attention"),
            ("gemm", "custom-call", "attention"),
            ("paged", "custom-call", "attention/paged_attention"),
            ("add_fusion", "fusion", "mlp"),
            ("gemm_up", "custom-call", "mlp"),
        )
    }
    order = ProgramOrder(
        {"embed_fusion": Operation("fusion", "embed")} | layers | {"last": Operation("fusion", "head")}
    )
    layer = ["norm_fusion", "nvjet", "paged_kernel", "add_fusion", "nvjet", "splitK_reduce"]
    found = order.follow([*("embed_fusion", *layer, *layer, *layer, "last") * 2])
    stages = ["attention", "attention", "attention/paged_attention", "mlp", "mlp", "mlp"]
    once = ["embed", *(f"layer_{number:02d}/{stage}" for number in range(3) for stage in stages), "head"]
    assert [one.stage for one in found] == once * 2
    assert order.follow(["norm_fusion", "a", "b", "c", "add_fusion"])[1:4] == [None] * 3, "a choice is no guess"
    assert order.follow(["nvjet"]) == [None]


def test_pallas_kernels_have_names_of_their_own():
    text = """ENTRY %main (x: f32[8]) -> f32[8] {
  %pallas_call.1 = f32[8]{0} custom-call(%x), metadata={op_name="jit(f)/layer_00/attention/call"}, backend_config={grid_z = 1 : i32, ir = "MLIR name", name = "paged_decode", num_warps = 4 : i32}
  %pallas_call.2 = f32[8]{0} custom-call(%x), metadata={op_name="jit(f)/layer_00/mlp/call"}, backend_config={grid_z = 1 : i32, ir = "MLIR", name = "add_rms_norm", num_warps = 4 : i32}
}
"""
    operations = read_operations(text)
    assert [one.kernel for one in operations.values()] == ["paged_decode", "add_rms_norm"]
    found = ProgramOrder(operations).follow(["add_rms_norm__1", "paged_decode"])
    assert [one.stage for one in found] == ["layer_00/mlp", "layer_00/attention"]


def test_the_longest_kernels(tmp_path):
    summary = summary_of(tmp_path, to_planes(*make_steps(calls=4)))
    first, second = summary.kernels[:2]
    assert (first.name, first.stage, first.count) == ("nvjet_tst_64x8", "mlp", 1)
    assert (second.name, second.stage, second.us_each) == ("nvjet_tst_64x8", "attention", pytest.approx(200))
    assert len(summary.kernels) == 8


def test_work_and_ceilings(tmp_path):
    (bucket,) = summary_of(tmp_path, to_planes(*make_steps(calls=2))).buckets
    stages = {stage.name: stage for stage in bucket.stages}
    mlp = stages["mlp"]
    assert mlp.gigabytes == pytest.approx(32 * 2 * 3 * 4096 * 14336 / 1e9)
    assert mlp.gigaflops == pytest.approx(32 * 64 * 2 * 3 * 4096 * 14336 / 1e9)
    assert mlp.tb_per_s == pytest.approx(mlp.gigabytes / 0.33)
    kv = 64 * 512 * 32 * 2 * 8 * 128 * 2 / 1e9
    assert stages["attention/paged_attention"].gigabytes == pytest.approx(kv)
    assert stages["attention"].gigabytes == pytest.approx(kv * (1 + 1 / 512) + LAYER_WEIGHTS["attention"] / 1e9)
    assert stages["prepare"].tb_per_s is None


def test_the_bytes_of_a_step_are_those_of_the_roofline():
    """1 row of the 8B shape: what a decode step has to read at the least."""
    work = work_of(Load(1, 1, 1, 512, 512, 1), SIZES)
    read = sum(work[stage].num_bytes for stage in ("embed", "attention", "mlp", "head"))
    assert read == pytest.approx(15.08e9, rel=0.01)
    assert work["attention"].flops + work["mlp"].flops + work["head"].flops == pytest.approx(
        2 * 7.504e9 + 4 * 512 * 4096 * 32, rel=1e-3
    )


def test_a_window_and_more_devices_mean_less_work():
    windowed = dataclasses.replace(LLAMA_8B, layers=(LayerKind(window=128), LayerKind()) * 16)
    load = Load(2, 2, 2, 2 * 512, 2 * 512, 2)
    whole, half = (work_of(load, Sizes.of(model, "bfloat16", 1, {})) for model in (LLAMA_8B, windowed))
    paged = "attention/paged_attention"
    assert half[paged].num_bytes == pytest.approx(whole[paged].num_bytes * (512 + 128) / 1024)
    assert half[paged].flops == pytest.approx(whole[paged].flops * (512 + 128) / 1024)
    two = work_of(load, Sizes.of(LLAMA_8B, "bfloat16", 2, {"mlp": 100}))
    assert two["mlp"].flops == whole["mlp"].flops / 2
    assert two["mlp"].num_bytes == 200, "weights are those of one device already, and read in both steps"


def test_idle_time_is_idle_only_while_a_step_is_in_flight(tmp_path):
    """A gap of 100 us within a step, and a second between requests."""
    device, host = make_steps(calls=2)
    later = 10**6
    moved = [dataclasses.replace(event, start=event.start + later) for event in device + host]
    summary = summary_of(tmp_path, to_planes(device + moved[: len(device)], host + moved[len(device) :]))
    (bucket,) = summary.buckets
    assert bucket.idle_ms < 0.15
    assert bucket.step_ms == pytest.approx(1.0, rel=0.06)
    assert all(gap.us < 200 for gap in summary.gaps)
    assert summary.gaps[0].after == "sample" and summary.gaps[0].before == "prepare"
    assert summary.gaps[0].host == "launch"


def test_the_host_is_hidden_only_while_the_device_works(tmp_path):
    device, host = make_steps(calls=4)
    parts = {part.name: part for part in summary_of(tmp_path, to_planes(device, host)).host}
    assert parts["launch"].hidden_ms == 0 and parts["launch"].exposed_ms == pytest.approx(0.05 * 2 / 4)
    assert parts["read"].hidden_ms == pytest.approx(0.9)
    assert sum(part.exposed_ms for part in parts.values()) == pytest.approx(0.1 * 3 / 4)


def test_reads_of_calls_before_the_session_are_left_out(tmp_path):
    device, host = make_steps(calls=3)
    early = [Event("read", 1, 5), Event("read", 10, 5)]
    summary = summary_of(tmp_path, to_planes(device, early + host), dataclasses.replace(FACTS, num_unread=2))
    assert summary.buckets[0].step_ms == pytest.approx(1.0)


def test_what_is_recorded_after_the_end_is_left_out(tmp_path):
    """The engine goes on while the recorder stops."""
    device, host = make_steps(calls=3)
    end = Event("settled", 3 * STEP_US + 95, 1)  # microseconds; the third call ended
    later = [dataclasses.replace(event, start=event.start + 4 * STEP_US) for event in (*device, *host)]
    text = to_planes([*device, *later[: len(device)]], [*host, end, *later[len(device) :]])
    whole = to_planes(device, host)
    assert read_trace(gpu_trace.write(tmp_path / "cut", text)) == read_trace(gpu_trace.write(tmp_path / "whole", whole))


def test_a_device_that_nobody_measured_has_no_ceiling(tmp_path):
    text = to_planes(*make_steps(calls=2))
    known = to_text(make_tables(summary_of(tmp_path, text)))
    unknown = to_text(make_tables(summary_of(tmp_path, text, dataclasses.replace(FACTS, device_kind="cpu"))))
    assert "4.32 TB/s, 756 TFLOP/s" in known and "unknown" not in known
    assert "unknown: not measured" in unknown and "%" in unknown


def test_a_folder_is_all_that_a_report_needs(tmp_path):
    gpu_trace.write(tmp_path, to_planes(*make_steps(calls=3)))
    FACTS.write(tmp_path)
    profile = write_report(tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["steps"] == 3 and found["buckets"][0]["load"]["rows"] == 64
    assert found["buckets"][0]["accounted"] == pytest.approx(1, rel=0.05)
    assert found["ceiling"] == {"read": 4.32, "compute": 756.0}
    assert (tmp_path / "summary.txt").read_text() == str(profile)
    assert "paged_attention" in str(profile)
    page = profile.timeline.read_text()
    assert "llama-3.1-8b: 3 steps" in page and "nvjet_tst_64x8" in page
    assert "<!--" not in page and "://" not in page and "src=" not in page, "nothing is loaded"


def test_errors_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="holds no profile"):
        read_trace(tmp_path)
    with pytest.raises(ValueError, match=r"no session\.json"):
        SessionFacts.read(tmp_path)
    with pytest.raises(ValueError, match="holds no step"):
        summary_of(tmp_path, to_planes([], [Event("step", 0, 5)]))
