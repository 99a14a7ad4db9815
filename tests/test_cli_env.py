"""`jaxllm env`: what is found, that no failure of a probe ends it, and that it keeps secrets."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxllm.serving import cli, cli_env, device_report

type Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process: starting JAX once more takes seconds, and one test does it."""
    monkeypatch.setitem(cli_env.PROBES, "devices", device_report.describe_devices)


def test_text_has_everything(capsys: Capture) -> None:
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"\n  jax: {jax.__version__}\n" in text
    assert f"\n  python: {sys.version_info.major}.{sys.version_info.minor}." in text
    assert "\ndevices:\n  8 x cpu (cpu)\n" in text
    for name in cli_env.PROBES:
        assert f"\n{name}:" in f"\n{text}"


def test_json_is_the_same(capsys: Capture) -> None:
    assert cli.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == list(cli_env.PROBES)
    assert report["versions"]["jaxllm"]
    assert not [finding for finding in report.values() if str(finding).startswith("failed")]


@pytest.mark.parametrize("broken", list(cli_env.PROBES))
def test_probe_that_fails_is_shown_and_the_others_are_too(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail() -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(cli_env.PROBES, broken, fail)
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"{broken}: failed: PermissionError: [Errno 13] Permission denied\n" in text
    assert text.count("failed") == 1


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret1")
    monkeypatch.setenv("JAXLLM_API_KEY", "secret2")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret3@mirror.example/hub")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    monkeypatch.setenv("OTHER_SETTING", "not of interest")
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    assert "HF_TOKEN: (set, not shown)" in text
    assert "HF_ENDPOINT: https://***@mirror.example/hub" in text
    assert "XLA_FLAGS: --xla_dump_to=/tmp/x" in text
    assert "OTHER_SETTING" not in text


def test_devices_are_found_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cli_env.find_devices() == ["1 x cpu (cpu)"]


def fake_process(returncode: int, stdout: str, stderr: str) -> Callable[..., subprocess.CompletedProcess]:
    return lambda command, **_: subprocess.CompletedProcess(command, returncode, stdout, stderr)


def test_jax_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "Traceback\n  File\n    assert ready\nAssertionError\n"
    monkeypatch.setattr(subprocess, "run", fake_process(1, "", error))
    with pytest.raises(RuntimeError, match=r"ended with 1: assert ready \| AssertionError"):
        cli_env.find_devices()


def test_gpu_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", fake_process(0, "NVIDIA H200, 575.1, 143771 MiB\n" * 2, ""))
    assert cli_env.find_gpu_driver() == ["NVIDIA H200, 575.1, 143771 MiB"] * 2


def test_no_gpu_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli_env.find_gpu_driver() == "there is no nvidia-smi"


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    assert cli_env.find_cache() == "~/cache, does not exist yet"
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "a.gguf").write_bytes(b"x" * (3 << 20))
    (tmp_path / "cache" / "link").symlink_to("/nowhere")
    assert cli_env.find_cache() == "~/cache, 2 files, 3.0 MiB"
