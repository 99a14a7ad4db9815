"""The tuning script on a CPU, where kernels are interpreted, and the table it writes."""

import json

import jax.numpy as jnp
import pytest
from test_bench_table import load_script

from jaxllm.bench.settings import Extent, KernelSettings
from jaxllm.kernels.launches import TABLE, Kernel, Launch

tune_kernels = load_script("tune_kernels")

SMALL = ["--head-dim", "64", "--group", "2", "--kv-heads", "1", "--dtype", "float32", "--calls", "1"]
GRID = ["--split", "32", "--rows", "16", "--num-warps", "4", "--num-stages", "2"]
CURRENT = Launch(32, 32, 16, 4, 2)
SETTINGS = KernelSettings(num_heads=2, num_kv_heads=1, head_dim=64, dtype="float32")


@pytest.mark.parametrize(("kernel", "tiles"), [("decode", "32,64"), ("chunks", "16,32")])
def test_a_launch_is_found_and_written(kernel, tiles, tmp_path, capsys, monkeypatch):
    table = tmp_path / "launches.json"
    monkeypatch.setattr(tune_kernels, "find_launch", lambda *_: CURRENT)
    arguments = ["--kernel", kernel, f"--{kernel}-shapes", "1x20", "--context-tile", tiles, "--output", str(table)]
    tune_kernels.main([*SMALL, *GRID, *arguments])
    written, committed = json.loads(table.read_text()), json.loads(TABLE.read_text())
    entries = written.pop("cpu")
    assert written == committed
    inherited = next(iter(committed.values()))
    added = [entry for entry in entries.pop(kernel) if entry not in inherited[kernel]]
    assert [entry["head_dim"] for entry in added] == [64]
    assert entries.items() <= inherited.items()
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) >= 3
    assert shown.count("chosen") == 1


def test_wrong_results_are_refused():
    problem = tune_kernels.make_problem("chunks", Extent(1, 20), SETTINGS)
    program = tune_kernels.lower_calls(problem, CURRENT, 1).compile()
    assert tune_kernels.measure(problem, program, 1e-4, 1) > 0
    for expected in (problem.expected + 1, jnp.full_like(problem.expected, jnp.nan)):
        assert "wrong" in tune_kernels.measure(problem._replace(expected=expected), program, 1e-4, 1)


def test_what_does_not_fit_together_is_not_tried():
    grid = {"split": (32, 64), "context_tile": (32, 64), "rows": (4, 16), "num_warps": (4,), "num_stages": (2,)}
    current = Launch(64, 64, 16, 4, 2)
    launches = tune_kernels.launches_of(grid, "chunks", 8, current)
    assert launches == [current, Launch(32, 32, 16, 4, 2), Launch(64, 32, 16, 4, 2)]


def test_the_current_launch_is_kept_if_another_is_hardly_faster():
    current, other = Launch(64, 64, 16, 4, 2), Launch(64, 32, 16, 4, 2)
    for factor, chosen in ((1.005, current), (1.1, other)):
        ways = [tune_kernels.Way(other, (1.0, 4.0)), tune_kernels.Way(current, (factor, 4.0 * factor))]
        assert tune_kernels.choose(ways, current).launch == chosen
    assert ways[0].score == pytest.approx(2.0)


def test_an_entry_replaces_its_own_head_size_only(tmp_path):
    path = tmp_path / "launches.json"
    for head_dim, launch in ((256, Launch(64, 64, 16, 4, 2)), (64, Launch(64, 32, 16, 4, 2))):
        tune_kernels.update(path, "a new GPU", "decode", head_dim, launch)
    tune_kernels.update(path, "a new GPU", "decode", 64, Launch(32, 32, 16, 4, 2))
    table = json.loads(path.read_text())
    decode = table["a new GPU"]["decode"]
    assert [entry["head_dim"] for entry in decode] == [64, 128, 256]
    assert (decode[0]["split"], decode[2]["split"]) == (32, 64)
    del table["a new GPU"]
    assert table == json.loads(TABLE.read_text())


def test_the_committed_table_is_not_written_on_a_cpu():
    with pytest.raises(SystemExit):
        tune_kernels.main([*SMALL, *GRID])


def test_the_committed_table():
    text = TABLE.read_text()
    table = json.loads(text)
    assert tune_kernels.format_table(table) == text
    for kernels in table.values():
        assert sorted(kernels) == sorted(Kernel.__value__.__args__)
        for entries in kernels.values():
            head_dims = [entry["head_dim"] for entry in entries]
            assert head_dims == sorted(set(head_dims))
            for entry in entries:
                assert set(entry) == {"head_dim", *Launch._fields}
                assert entry["split"] % entry["context_tile"] == 0
