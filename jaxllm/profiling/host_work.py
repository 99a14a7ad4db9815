"""The names of what the host does for a step, as they stand in a trace.

Invariant: each name is an annotation of the runner or the engine (`jaxllm.runner.annotations`); stretches of them do not overlap.
"""

from __future__ import annotations

STEP = "step"
"""One turn of the engine: it launches what it can and reads the oldest step. Holds most of the others."""
SCHEDULE, PACK, LAUNCH, READ, UPDATE, DETOKENIZE = "schedule", "pack", "launch", "read", "update", "detokenize"
HOST_WORK = (SCHEDULE, PACK, LAUNCH, READ, UPDATE, DETOKENIZE)
"""In the order of a step. To read is to wait for the device, most of all."""
SETTLED = "settled"
"""The end of a session, marked when nothing runs: what is recorded after it, until the recorder stops, is no part."""
BETWEEN = "between"
"""What has no annotation: the loop itself, messages, the caller."""
