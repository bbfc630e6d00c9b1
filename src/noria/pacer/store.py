"""Keeps what step times have taught, so that a restart need not learn anew.

One small file per machine and model in Noria's own folder. Nothing in it is believed before it is checked, and nothing
about it is ever an error: what cannot be read or written is said in one line of the log, and learned anew.
"""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from noria.errors import NoriaError
from noria.files.replace import replace_file
from noria.files.resolve import home_dir, resolve
from noria.pacer.limits import processor_name
from noria.pacer.steptime import FEATURES, SIZES, Fit, profile_id
from noria.plan import WorkerInfo

_log = logging.getLogger(__name__)

_FORMAT = 1
_MOST_BYTES = 64 * 1024  # of a file
_MOST_FILES = 64  # kept; the ones written longest ago go first


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What step times depend on.

    Attributes:
        model: name, and bytes of its weight files. weights, cache: how they are held.
        processor: its name.
    """

    model: str
    weights: str
    cache: str
    backend: str
    isa: str
    threads: int
    processor: str

    @property
    def file(self) -> str:
        """Name of the file."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.model)[:48]}-{digest}.json"


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. `profile`: of the features that `fit` speaks of."""

    format: int
    profile: str
    key: Key
    theta: list[float]
    information: list[list[float]]
    stretch: float
    sizes: list[int]
    steps: int


def step_times_dir() -> Path:
    """Where the files are: `$NORIA_HOME/step-times`, or `~/.cache/noria/step-times`."""
    return home_dir() / "step-times"


def make_key(model: str, info: WorkerInfo) -> Key:
    """The key of an engine. `model`: as the user named it."""
    try:
        files = resolve(model)
        name = f"{files.name} {sum(file.stat().st_size for file in files.weight_files)}"
    except (NoriaError, OSError, RuntimeError):  # the last one, if the user has no home
        name = model
    return Key(
        model=name,
        weights=info.weights,
        cache=info.cache_dtype,
        backend=info.backend,
        isa=info.isa,
        threads=info.threads,
        processor=processor_name(),
    )


def load(key: Key) -> Fit | None:
    """What was learned under this key; None if nothing (usable) was."""
    path: Path | None = None
    try:
        path = step_times_dir() / key.file
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES} bytes")
        return _checked(msgspec.json.decode(data, type=_Stored), key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        _log.warning("learning step times anew: %s is not usable: %s", path, error)
        return None


def save(key: Key, fit: Fit) -> bool:
    """Stores what was learned, whole or not at all; returns whether."""
    stored = _Stored(format=_FORMAT, profile=profile_id(), key=key, **fit._asdict())
    try:
        folder = step_times_dir()
        replace_file(folder / key.file, msgspec.json.encode(stored))
        _tidy(folder)
    except OSError as error:
        _log.warning("step times are not kept for the next start: %s", error)
        return False
    return True


def _tidy(folder: Path) -> None:
    """Removes the files written longest ago beyond the most that are kept."""
    dated = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process may tidy too
            dated.append((path.stat().st_mtime, path))
    for _, path in sorted(dated)[:-_MOST_FILES]:
        with suppress(OSError):
            path.unlink()


def _checked(stored: _Stored, key: Key) -> Fit:
    """The fit. Raises ValueError."""
    if stored.format != _FORMAT or stored.profile != profile_id():
        raise ValueError("written by another version")
    if stored.key != key:
        raise ValueError("of another model or machine")
    theta, information = np.array(stored.theta), np.array(stored.information, np.float64)
    if theta.shape != (FEATURES,) or information.shape != (FEATURES, FEATURES) or len(stored.sizes) != SIZES:
        raise ValueError("of another shape")
    if not (np.isfinite(theta).all() and np.isfinite(information).all() and abs(stored.stretch) < 50.0):
        raise ValueError("not finite")
    if (theta < 0.0).any() or theta.max() > 1e4 or np.abs(information).max() > 1e15 or not 0 <= stored.steps <= 2**53:
        raise ValueError("out of range")
    if min(stored.sizes) < 0 or max(stored.sizes) > 2**53:
        raise ValueError("out of range")
    if not np.allclose(information, information.T, rtol=1e-6) or _least(information) < -1e-6:
        raise ValueError("no information matrix")
    return Fit(stored.theta, stored.information, stored.stretch, stored.sizes, stored.steps)


def _least(information: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Smallest eigenvalue as a share of the largest."""
    values = np.linalg.eigvalsh(information)
    return float(values[0] / max(values[-1], 1e-300))
