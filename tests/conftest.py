"""Fixtures and the devices every test sees: eight fake CPU devices."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

# The named axes of every array in these modules are checked, in tests only.
install_import_hook(
    ["jaxllm.kernels", "jaxllm.models.rope", "jaxllm.models.layers", "jaxllm.runner.sampler"],
    "beartype.beartype",
)

from jaxllm.models.hub import pull  # noqa: E402 - after the hook

# A GPU in the machine is left to the tests that are marked for it.
jax.config.update("jax_num_cpu_devices", 8)
if os.environ.get("JAX_PLATFORMS") is None:
    jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file; downloaded once into the user's cache folder."""
    return pull("smollm2-135m-instruct")
