"""A profile as XLA writes it on a GPU, made by hand: kernels on a stream, copies on others, annotations of the host.

It is XLA's own format, read by JAX's own reader. What a kernel event says is what CUPTI's events say there: the
kernel's name, and as statistics the operation, its scopes and the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxllm.model_config import ModelConfig
from jaxllm.profiling.session_facts import SessionFacts
from jaxllm.profiling.work import Sizes

PS_PER_US = 10**6
PROGRAM = "jit_decode_64"
HLO = """\
HloModule jit_decode_64, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused_norm (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %mul.1 = f32[8]{0} multiply(%p, %p), metadata={op_name="jit(decode_64)/layer_00/jit(_run_layer)/mlp/mul"}
  %add.1 = f32[8]{0} add(%mul.1, %p), metadata={op_name="jit(decode_64)/layer_00/jit(_run_layer)/mlp/add"}
  ROOT %sub.1 = f32[8]{0} subtract(%add.1, %p), metadata={op_name="jit(decode_64)/layer_00/jit(_run_layer)"}
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %copy.9 = f32[8]{0} copy(%b)
  ROOT %tuple.9 = (s32[], f32[8]{0}) tuple(%b, %copy.9)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %loop_fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_prepare, metadata={op_name="jit(decode_64)/prepare/add"}
  %gather.1 = f32[8]{0} gather(%x), metadata={op_name="jit(decode_64)/embed/gather"}
  %gemm.1 = f32[8]{0} custom-call(%x), metadata={op_name="jit(decode_64)/layer_00/jit(_run_layer)/attention/dot_general"}
  %paged.1 = f32[8]{0} custom-call(%x), metadata={op_name="jit(decode_64)/layer_00/jit(_run_layer)/attention/paged_attention/call"}
  %norm-fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_norm, metadata={op_name="jit(decode_64)/layer_00/jit(_run_layer)"}
  %gemm.2 = f32[8]{0} custom-call(%x), metadata={op_name="jit(decode_64)/layer_01/jit(_run_layer)/mlp/dot_general"}
  %gemm.3 = f32[8]{0} custom-call(%x), metadata={op_name="jit(decode_64)/head/dot_general"}
  %while.1 = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body, metadata={op_name="jit(decode_64)/sample/while"}
  ROOT %copy.1 = f32[8]{0} copy(%x)
}
"""
"""A program of two layers, as XLA prints it."""

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14336, max_position_embeddings=131072, dtype="bfloat16",
)  # fmt: skip
LAYER_WEIGHTS = {"attention": 32 * 2 * 4096 * (2 * 4096 + 2 * 1024), "mlp": 32 * 2 * 3 * 4096 * 14336}
SIZES = Sizes.of(LLAMA_8B, "bfloat16", 1, {**LAYER_WEIGHTS, "head": 2 * 4096 * 128256})
FACTS = SessionFacts({"model": "llama-3.1-8b"}, "NVIDIA H200", SIZES, {"decode-64": PROGRAM}, {PROGRAM: HLO})


@dataclass(frozen=True)
class Event:
    """Microseconds."""

    name: str
    start: float
    time: float
    facts: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """One of a step: where it is in the program, and for how many microseconds it runs."""

    name: str
    operation: str
    time: float

    def at(self, start: float) -> Event:
        return Event(self.name, start, self.time, {"hlo_op": self.operation, "hlo_module": PROGRAM})


STEP_KERNELS = (
    Kernel("loop_fusion_1", "loop_fusion.1", 10),
    Kernel("gather_1", "gather.1", 20),
    Kernel("nvjet_tst_64x8", "gemm.1", 200),
    Kernel("paged_attention_kernel", "paged.1", 100),
    Kernel("norm_fusion_1", "norm-fusion.1", 30),
    Kernel("nvjet_tst_64x8", "gemm.2", 300),
    Kernel("nvjet_tst_128x8", "gemm.3", 150),
    Kernel("sample_kernel", "while.1::copy.9", 90),
)
"""900 us."""
STEP_US = 1000
STAGE_US = {
    "prepare": 10, "embed": 20, "attention": 300, "attention/paged_attention": 100, "mlp": 330, "head": 150, "sample": 90
}  # fmt: skip


def launch(start: float, steps: int = 1) -> Event:
    """64 rows of context 512."""
    rows = 64 * steps
    facts = {
        "steps": steps,
        "rows": rows,
        "tokens": rows,
        "contexts": 512 * rows,
        "attended": 512 * rows,
        "sampled": rows,
    }
    return Event("launch", start, 50, {"bucket": "decode-64", **facts})


def make_steps(calls: int, steps: int = 1, kernels: Sequence[Kernel] = STEP_KERNELS) -> tuple[list[Event], list[Event]]:
    """Kernels and host events of calls that follow one another, each launched before the one before it is read.

    Of every step's 1000 us the device works for 900, once the host has launched the next call.
    """
    device, host = [], [launch(40, steps)]
    for call in range(calls):
        begin = 100 + call * steps * STEP_US
        host += [Event("step", begin, steps * STEP_US - 10), Event("schedule", begin, 20)]
        host += [launch(begin + 20, steps)] * (call < calls - 1)
        host.append(Event("read", begin + 90, steps * STEP_US - 90))
        for step in range(steps):
            now = begin + 100 + step * STEP_US
            for kernel in kernels:
                device.append(kernel.at(now))
                now += kernel.time
    return device, host


def to_planes(device: Iterable[Event], host: Iterable[Event], others: Iterable[Event] = ()) -> str:
    """A profile in text; `others` are copies, on a stream of their own."""
    lines = [("Stream #13(Compute)", list(device)), ("Stream #14(MemcpyH2D)", list(others)), ("XLA Ops", list(device))]
    return _plane("/device:GPU:0", [line for line in lines if line[1]]) + _plane("/host:CPU", [("python", list(host))])


def write(folder: Path, text: str) -> Path:
    """As JAX names the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "host.xplane.pb").write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    return folder


def in_graph(events: Iterable[Event]) -> list[Event]:
    """As within a CUDA graph: all kernels are of one operation, the graph."""
    return [dataclasses.replace(event, facts=event.facts | {"hlo_op": "command_buffer_1"}) for event in events]


def _plane(name: str, lines: Sequence[tuple[str, list[Event]]]) -> str:
    events = [event for _, line in lines for event in line]
    names = {text: number for number, text in enumerate(dict.fromkeys(event.name for event in events), 1)}
    facts = {text: number for number, text in enumerate(dict.fromkeys(key for one in events for key in one.facts), 1)}
    parts = [f'planes {{ name: "{name}"']
    for number, (line, own) in enumerate(lines, 1):
        parts.append(f'lines {{ id: {number} name: "{line}" timestamp_ns: 5000')
        parts += [_event(event, names, facts) for event in own]
        parts.append("}")
    for kind, known in (("event_metadata", names), ("stat_metadata", facts)):
        parts += [f'{kind} {{ key: {at} value {{ id: {at} name: "{text}" }} }}' for text, at in known.items()]
    return "\n".join([*parts, "}\n"])


def _event(event: Event, names: dict[str, int], facts: dict[str, int]) -> str:
    stats = []
    for key, value in event.facts.items():
        shown = f"int64_value: {value}" if isinstance(value, int) else f'str_value: "{value}"'
        stats.append(f"stats {{ metadata_id: {facts[key]} {shown} }}")
    times = f"offset_ps: {round(event.start * PS_PER_US)} duration_ps: {round(event.time * PS_PER_US)}"
    return f"events {{ metadata_id: {names[event.name]} {times} {' '.join(stats)} }}"
