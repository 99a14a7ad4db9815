"""README's tables of measured numbers: made from the newest figures, and up to date."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from jaxllm.bench import report

ROOT = Path(__file__).resolve().parent.parent


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


bench_table = load_script("bench_table")


def write(folder, name, date, figures, model="some/folder/m", device="GPU", **engine):
    machine = {"device": device, "count": 1, "driver": "580.1", "cpu": "CPU", "jax": "0.11"}
    content = {"benchmark": "all", "model": model, "machine": machine, "parameters": {"engine": engine}, "date": date}
    content |= {"command": f"jaxllm bench {name}", "commit": "0123456789abcdef0123-dirty"}
    content["figures"] = [
        {"name": figure, "value": value, "unit": unit, "details": details} for figure, value, unit, details in figures
    ]
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_both_files_are_up_to_date():
    made = bench_table.make_files()
    assert [file.read_text() for file in made] == list(made.values()), "run scripts/bench_table.py"
    main, every = (text.partition(bench_table.BEGIN)[2].count("\n|") for text in made.values())
    assert 0 < main < every


def test_newest_figures_side_by_side(tmp_path):
    write(tmp_path, "z-old", "2026-01-01T00:00:00", [("step", 9.0, "ms", {}), ("stream", 7.0, "ms", {})])
    write(tmp_path, "a-new", "2026-02-01T00:00:00", [("step", 4.321, "ms", {})])
    write(tmp_path, "other", "2026-01-15T00:00:00", [("step", 12345.6, "tok/s", {})], model="n")
    text = bench_table.make_text(bench_table.read_entries(tmp_path))
    assert "|  | m | n |\n| --- | --- | --- |\n| step | 4.32 ms | 12,346 tok/s |\n| stream | 7 ms |  |\n" in text
    assert "- `jaxllm bench a-new` (2026-02-01, jax 0.11, driver 580.1, commit 0123456789ab-dirty)" in text


def test_other_choices_are_other_measurements(tmp_path):
    write(tmp_path, "compiled", "2026-01-01T00:00:00", [("step", 4.0, "ms", {})], dtype="bfloat16")
    write(tmp_path, "eager", "2026-01-02T00:00:00", [("step", 7.0, "ms", {})], enforce_eager=True)
    choices = {"dtype": "float32", "attention_backend": "xla"}
    write(tmp_path, "wide", "2026-01-03T00:00:00", [("step", 9.0, "ms", {})], **choices)
    text = bench_table.make_text(bench_table.read_entries(tmp_path))
    assert "|  | m | m, eager | m, float32, xla attention |\n" in text
    assert "| step | 4 ms | 7 ms | 9 ms |" in text


def test_machines_and_kernels_have_tables_of_their_own(tmp_path):
    kernel = [("attention", 4.1, "TB/s", {"share": 0.949, "correct": True})]
    write(tmp_path, "kernels", "2026-01-01T00:00:00", kernel, model=None)
    write(tmp_path, "all", "2026-01-02T00:00:00", [("step", 4.0, "ms", {})])
    write(tmp_path, "cpu", "2026-01-02T00:00:00", [("step", 40.0, "ms", {})], device="cpu")
    text = bench_table.make_text(bench_table.read_entries(tmp_path))
    assert text.count("\n| --- |") == 3
    assert "|  | value |\n| --- | --- |\n| attention | 4.1 TB/s (95%) |" in text
    assert text.index("On 1 x GPU") < text.index("On 1 x cpu")


def test_figures_of_wrong_results_are_refused(tmp_path):
    write(tmp_path, "kernels", "2026-01-01T00:00:00", [("attention", 9.9, "TB/s", {"correct": False})], model=None)
    with pytest.raises(ValueError, match=r"kernels\.json: attention was timed with a wrong result"):
        bench_table.read_entries(tmp_path)


def test_only_what_lies_between_the_markers_changes():
    readme = f"before\n{bench_table.BEGIN}\nold\n{bench_table.END}\nafter\n"
    assert bench_table.replace(readme, "new\n") == f"before\n{bench_table.BEGIN}\nnew\n{bench_table.END}\nafter\n"
    with pytest.raises(ValueError, match="lacks one of the markers"):
        bench_table.replace("no markers", "new\n")


def test_nothing_measured_is_no_table(tmp_path):
    assert bench_table.make_text(bench_table.read_entries(tmp_path)) == ""


def test_the_set_of_measurements_keeps_each_part_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the script adds the checkout
    script = load_script("bench_h200")
    machine = {"device": "GPU", "count": 1, "driver": None, "cpu": "CPU", "jax": "0.11"}
    figure = report.Figure("attention", 4.0, "TB/s", {"correct": True})
    made = report.Report("kernels", None, machine, {}, [figure], date="2026-01-02T03:04:05+00:00")
    monkeypatch.setitem(script.PARTS, "kernels", lambda: made)
    arguments = ["bench_h200.py", "--here", "--only", "kernels", "--folder", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    kept = json.loads((tmp_path / "2026-01-02-kernels.json").read_text())
    assert (kept["command"], kept["commit"]) == ("scripts/bench_h200.py --only kernels", "abc")
    assert "attention | 4 TB/s" in bench_table.make_text(bench_table.read_entries(tmp_path))
