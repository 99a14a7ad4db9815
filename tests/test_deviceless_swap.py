"""The programs that copy K/V blocks to host memory and back, compiled for H200s on a machine without one.

See test_deviceless.py for what this needs.
"""

import pytest
from test_deviceless import needs_plugin, run

CHUNK, CACHE = 256 * 131072, 4096 * 16 * 131072
"""Bytes of a chunk of 256 tokens, and of the cache, on all devices together."""

each_size = pytest.mark.parametrize("devices", [1, 2])


@pytest.fixture(scope="module")
def programs():
    return run("deviceless_swap.py")


@needs_plugin
@each_size
def test_what_leaves_is_gathered_by_one_kernel(programs, devices):
    out = programs[str(devices)]["out"]
    assert (out["fusions"], out["temp"], out["output"]) == (1, 0, CHUNK // devices)


@needs_plugin
@each_size
def test_what_comes_is_written_in_place(programs, devices):
    back = programs[str(devices)]["in"]
    assert back["fusions"] <= 64 and back["alias"] == CACHE // devices
    assert back["temp"] <= CHUNK // devices


@needs_plugin
@each_size
@pytest.mark.parametrize("direction", ["out", "in"])
def test_no_cache_is_copied_and_devices_keep_to_themselves(programs, devices, direction):
    program = programs[str(devices)][direction]
    assert program["copies"] == [] and program["collectives"] == 0
