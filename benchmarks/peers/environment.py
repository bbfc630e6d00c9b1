"""Python environments of the engines: one each, made once, kept until they are deleted or ask for something else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peers.base import Unavailable


class Environment:
    """A virtual environment with some packages.

    The index is whatever pip is set up to use; packages are called by name.

    Args:
        packages: groups, installed in calls of their own, in order.
        limit: seconds that all of the installation may take.
        without: packages that are asked for by others, but are in the way.
    """

    def __init__(
        self, folder: Path, packages: Sequence[Sequence[str]], limit: float, without: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self._packages = [list(group) for group in packages]
        self._without = list(without)
        self._limit = limit

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Installs what is not installed yet. Raises Unavailable."""
        stamp = self.folder / "installed.json"
        if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == self._packages:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._limit
        log = self.folder / "install.log"
        log.unlink(missing_ok=True)
        if not self.python.exists():
            run_logged([sys.executable, "-m", "venv", str(self.folder)], log, deadline)
        for group in self._packages:
            run_logged([str(self.python), "-m", "pip", "install", "--prefer-binary", *group], log, deadline)
        if self._without:
            run_logged([str(self.python), "-m", "pip", "uninstall", "--yes", *self._without], log, deadline)
        stamp.write_text(json.dumps(self._packages), encoding="utf-8")

    def versions(self, *packages: str) -> dict[str, str]:
        """Installed versions."""
        code = "import json, sys\nfrom importlib.metadata import version\n"
        code += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
        command = [self.python, "-c", code, *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, str] = json.loads(done.stdout)
        return found


def run_logged(
    command: Sequence[str], log: Path, deadline: float, env: dict[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Runs a command of an installation; its output is appended to `log`.

    Raises:
        Unavailable: it failed or was not done at `deadline` (`time.monotonic`'s clock); with the end of its output.
    """
    what = " ".join(Path(part).name if index == 0 else part for index, part in enumerate(command[:6]))
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - time.monotonic()),
                env=env,
                cwd=cwd,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"`{what} …` was not done in time, see {log}") from None
        except OSError as error:
            raise Unavailable(f"`{what} …` could not be run: {error}") from None
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise Unavailable(f"`{what} …` failed ({lines[-1][:200]}), see {log}")
