"""scripts/bench_tensor_parallel.py, tried with a tiny model on two fake devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_tensor_parallel.py"


@pytest.mark.slow
def test_two_devices_against_one(tmp_path):
    command = [sys.executable, SCRIPT, "--tiny", "--folder", tmp_path, "--only", "tp1", "tp2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of tp1" in done.stdout and done.stdout.endswith("all done\n")
    one, two = (json.loads(file.read_text()) for file in sorted(tmp_path.iterdir()))
    assert (one["machine"]["count"], two["machine"]["count"]) == (1, 2)
    names = [figure["name"] for figure in one["figures"]]
    assert [figure["name"] for figure in two["figures"]][: len(names)] == names
    (agreement,) = two["figures"][len(names) :]
    assert agreement["details"]["correct"] is True and agreement["details"]["calls"] > 10
