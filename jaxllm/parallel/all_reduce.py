"""Who adds up what the devices of a mesh computed: compiler options for GPUs.

XLA's own kernels take less time for small sums but cannot be captured: a CUDA graph ends before each of them. NCCL's
can, so that a whole step is one graph, but not in a loop. Invariant: NVLink multicast is never asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

GRAPHS = "xla_gpu_enable_command_buffer"
KERNELS = "xla_gpu_experimental_use_collective_kernels"


def with_all_reduce(options: Mapping[str, str], mesh: Mesh, *, nccl: bool) -> dict[str, str]:
    """Compiler options of a step on this mesh.

    Args:
        options: for one device; what `xla_gpu_enable_command_buffer` lists is what graphs may hold.
        nccl: NCCL adds up, instead of XLA's kernels.
    """
    if not nccl or mesh.size == 1 or mesh.devices.flat[0].platform == "cpu":
        return dict(options)
    graphs = [kind for kind in options.get(GRAPHS, "").split(",") if kind and kind != "WHILE"]
    return {**options, KERNELS: "", GRAPHS: ",".join([*graphs, "COLLECTIVES"] if graphs else [])}
