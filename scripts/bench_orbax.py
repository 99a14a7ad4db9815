"""Times `jaxllm convert` and what it is for: restoring a model to the devices. Writes the JSON.

    python3 scripts/bench_orbax.py [--model llama-3.1-8b] [--scratch FOLDER] [--folder FOLDER] [--commit HASH]

Random weights are made on the device, written, and restored by another process, whose peak resident memory on the
host is measured, too: all of it, and what was resident before, with the GPU's memory taken and no weight read (on a
CPU the weights themselves are part of it). The files were written just before, so they
are read from the page cache where that is large enough. FOLDER is by default $OUT, or benchmarks/.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402 - a checkout that is not installed is measured, too
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from jaxllm.bench.report import Figure, Report, describe_machine, round_to, show_number  # noqa: E402
from jaxllm.config import EngineConfig  # noqa: E402
from jaxllm.models.conversion import convert  # noqa: E402
from jaxllm.models.layers import Setting  # noqa: E402
from jaxllm.models.parameters import define_model  # noqa: E402
from jaxllm.models.source import open_source  # noqa: E402
from jaxllm.parallel.mesh import make_mesh, prepare_devices  # noqa: E402
from jaxllm.parallel.partition import split_over  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape")
    parser.add_argument("--scratch", type=Path, help="where the model is written; by default a temporary folder")
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices to restore to")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of each GPU to take; the driver may need host memory in proportion",
    )
    parser.add_argument("--step", choices=("write", "restore"), help="do this one in this process")
    arguments = parser.parse_args()
    if arguments.step == "write":
        convert(EngineConfig(arguments.model, load_format="dummy"), arguments.scratch)
        return 0
    if arguments.step == "restore":
        return _restore(arguments)
    if arguments.scratch:
        arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        start = time.perf_counter()
        if code := _run("write", arguments, Path(scratch) / "model"):
            return code
        print(f"written after {time.perf_counter() - start:.0f} s, start of the process included", flush=True)
        return _run("restore", arguments, Path(scratch) / "model")


def _run(step: str, arguments: argparse.Namespace, scratch: Path) -> int:
    command = [sys.executable, __file__, "--step", step, "--scratch", scratch, "--model", arguments.model]
    command += ["--folder", arguments.folder, "--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
    command += ["--commit", arguments.commit] if arguments.commit else []
    return subprocess.run(command, cwd=ROOT).returncode


def _restore(arguments: argparse.Namespace) -> int:
    size = arguments.tensor_parallel_size
    share = arguments.gpu_memory_utilization
    config = EngineConfig(str(arguments.scratch), tensor_parallel_size=size, gpu_memory_utilization=share)
    prepare_devices(config)
    with open_source(config) as source:
        mesh = make_mesh(config)
        specs = define_model(
            split_over(source.config, size), Setting(jnp.dtype(source.config.dtype), mesh, "xla")
        ).specs
        # The first array makes XLA take its share of the device, and the driver what it needs for it on the host.
        jax.block_until_ready(jnp.zeros(1, device=NamedSharding(mesh, PartitionSpec())))
        before, start = _peak_gib(), time.perf_counter()
        params = source.load(specs)
        jax.block_until_ready(params)
        seconds = time.perf_counter() - start
    gigabytes = sum(array.nbytes for array in params.values()) / 1e9
    details = {"seconds": round_to(seconds), "gigabytes": round_to(gigabytes), "devices": size}
    memory = {"before_gib": round_to(before), "gpu_memory_utilization": share}
    figures = [
        Figure("restore from Orbax's format", round_to(gigabytes / seconds), "GB/s", details),
        Figure("peak resident host memory while restoring", round_to(_peak_gib()), "GiB", memory),
    ]
    for figure in figures:
        print(f"{figure.name}: {show_number(figure.value)} {figure.unit} {dict(figure.details)}", flush=True)
    parameters = {"engine": dataclasses.asdict(config) | {"model": arguments.model}}
    report = Report("orbax", arguments.model, describe_machine(mesh.devices.flat), parameters, figures)
    report = dataclasses.replace(report, command="scripts/bench_orbax.py", commit=arguments.commit or report.commit)
    report.write(arguments.folder / f"{report.date[:10]}-orbax-{arguments.model}.json")
    return 0


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    sys.exit(main())
