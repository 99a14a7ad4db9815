"""`jaxllm models`: every family and every short name, whole, whatever the terminal."""

import pytest
from rich.text import Text

from jaxllm.models.families import FAMILIES
from jaxllm.models.registry import REGISTRY
from jaxllm.serving import cli


def test_models_lists_families_and_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for family in FAMILIES:
        assert any(row[:1] == [family.name] and row[1].startswith(family.hf_architectures) for row in rows if row)
    for name in REGISTRY:
        assert any(name in row for row in rows)


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_nothing_is_cut_on_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["models"]) == 0
    text = Text.from_ansi(capsys.readouterr().out).plain
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    for entry in REGISTRY.values():
        assert entry.description.split()[-1] in text
