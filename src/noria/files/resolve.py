"""From what a user wrote after `--model` to the files of a model on this machine.

Owns the places where models lie: Noria's own folder and the Hugging Face cache. It never downloads (`pull` does).
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noria.errors import PullError, WeightsError
from noria.files.catalog import KNOWN
from noria.files.safetensors import weight_files

REPO_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        name: what it is called towards clients: short name, repository id, or the file's or directory's name.
        kind: how its weights are stored.
        path: the directory of a safetensors model; the (first) file of a GGUF or of a lone safetensors file.
        weight_files: all files with weights.
    """

    name: str
    kind: Literal["gguf", "safetensors"]
    path: Path
    weight_files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """Where `config.json`, `tokenizer.json` and the like are looked for."""
        return self.path if self.path.is_dir() else self.path.parent


def home_dir() -> Path:
    """Noria's own folder: `$NORIA_HOME`, or `~/.cache/noria`. Raises OSError if the user has no home."""
    home = os.environ.get("NORIA_HOME")
    try:
        if home:
            return Path(home).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "noria"
    except RuntimeError as error:
        raise FileNotFoundError("the user has no home folder: name one with NORIA_HOME") from error


def models_dir() -> Path:
    """Where pulled models live: `$NORIA_HOME/models`, or `~/.cache/noria/models`."""
    return home_dir() / "models"


def hub_cache_dir() -> Path:
    """Where the Hugging Face tools keep what they download."""
    for variable, tail in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if value := os.environ.get(variable):
            return Path(value).expanduser() / tail
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def resolve(model: str) -> ModelFiles:
    """Finds a model that is on this machine.

    Args:
        model: a short name (`smollm2`), a path of a directory or file, or a repository id (`owner/name`), with
            `:PART` appended to choose among several GGUF files of a directory or repository (`owner/name:Q4_K_M`).

    Raises:
        PullError: it is not here; says how to get it, or which known name is nearest.
        WeightsError: it is here but incomplete.
    """
    text = model.strip()
    if not text:
        raise PullError(f"no model was named; known names are {', '.join(KNOWN)}")
    if text in KNOWN:
        return _known(text)
    for whole, choice in ((text, ""), text.rpartition(":")[::2]):
        path = Path(whole).expanduser() if whole else None
        if path is not None and path.exists():
            return _local(path, choice, path.resolve().name if path.is_dir() else path.stem)
        if whole and REPO_ID.fullmatch(whole) and (snapshot := hub_snapshot(whole)) is not None:
            return _local(snapshot, choice, whole)
    raise PullError(_not_found(text))


def hub_snapshot(repo: str, revision: str = "main") -> Path | None:
    """The directory of a repository's revision in the Hugging Face cache; None if it is not there."""
    folder = hub_cache_dir() / f"models--{repo.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    if re.fullmatch(r"[0-9a-f]{7,64}", commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    there = [entry for entry in snapshots.iterdir() if entry.is_dir()] if snapshots.is_dir() else []
    return max(there, key=lambda entry: entry.stat().st_mtime, default=None)


def _known(name: str) -> ModelFiles:
    path = models_dir() / name / KNOWN[name].file
    if not path.is_file():
        raise PullError(f"model {name!r} is not on this machine yet: run `noria pull {name}`")
    return ModelFiles(name, "gguf", path, (path,))


def _local(path: Path, choice: str, name: str) -> ModelFiles:
    if path.is_file():
        return _file(path, name)
    gguf = _choose(path, choice)
    if gguf is not None:
        return _gguf(gguf, name)
    return ModelFiles(name, "safetensors", path, weight_files(path))


def _file(path: Path, name: str) -> ModelFiles:
    if path.suffix.lower() == ".safetensors":
        return ModelFiles(name, "safetensors", path, (path,))
    if path.suffix.lower() == ".gguf" or _starts_as_gguf(path):
        return _gguf(path, name)
    raise WeightsError(f"{path}: neither a .gguf nor a .safetensors file")


def _gguf(path: Path, name: str) -> ModelFiles:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return ModelFiles(name, "gguf", path, (path,))
    parts = tuple(path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise WeightsError(f"{path}: {missing[0]} is missing ({len(missing)} of {len(parts)} parts)")
    return ModelFiles(name, "gguf", parts[0], parts)


def _choose(folder: Path, choice: str) -> Path | None:
    """The GGUF file of a directory; None if the model is in safetensors files."""
    if not choice and next(folder.glob("*.safetensors"), None) is not None:
        return None
    files = [f for f in sorted(folder.rglob("*.gguf")) if "mmproj" not in f.name.lower()]
    files = [f for f in files if (match := _SPLIT.fullmatch(f.name)) is None or int(match[2]) == 1]
    fitting = [f for f in files if choice.lower() in f.name.lower()]
    exact = [f for f in fitting if re.search(rf"(^|[.-]){re.escape(choice)}([.-])", f.name, re.IGNORECASE)]
    fitting = exact if choice and len(exact) == 1 else fitting
    if len(fitting) == 1:
        return fitting[0]
    if not files:
        if choice:
            raise WeightsError(f"{folder}: no GGUF file that {choice!r} could choose")
        return None
    listed = ", ".join(f.name for f in files[:12])
    what = "several GGUF files" if not choice else f"{choice!r} fits {len(fitting)} of the GGUF files"
    raise WeightsError(f"{folder}: {what}; append :NAME to choose one of {listed}")


def _starts_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _not_found(text: str) -> str:
    known = [*KNOWN, *sorted(_cached_repositories())]
    if REPO_ID.fullmatch(text.rpartition(":")[0] or text) and not text.startswith((".", "/")):
        repo = text.rpartition(":")[0] or text
        near = difflib.get_close_matches(repo, known, 1, 0.75)
        hint = f" (or did you mean {near[0]!r}?)" if near else ""
        return f"model {text!r} is not on this machine: run `noria pull {repo}`{hint}"
    if "/" in text or "\\" in text or text.endswith((".gguf", ".safetensors")):
        return f"{text}: no such file or directory"
    near = difflib.get_close_matches(text.lower(), known, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(KNOWN)}."
    return f"no model is called {text!r}: {hint} Also possible: a path, or a repository id (owner/name)"


def _cached_repositories() -> list[str]:
    cache = hub_cache_dir()
    if not cache.is_dir():
        return []
    return [entry.name[8:].replace("--", "/", 1) for entry in cache.iterdir() if entry.name.startswith("models--")]
