"""transformers' `generate` over static batches, in process: what a server without continuous batching does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peers.base import Load, Place, Variant
from peers.convert import hf_folder
from peers.environment import Environment
from peers.sessions import Driven, driven

DRIVER = Path(__file__).parent / "drivers" / "static_batch_loop.py"
BATCH = 32


class Transformers:
    """See `base.Peer`."""

    name = "transformers"
    how = "in process"
    variants = (Variant("bf16", f"bf16, static batch of {BATCH}", "bf16", ("int8", "bf16"), most_requests=BATCH),)

    def __init__(self, place: Place) -> None:
        self._place = place
        packages = [["torch==2.13.0"], ["transformers", "safetensors"]]  # an unpinned torch brings CUDA
        self._environment = Environment(place.folder("transformers") / "env", packages, place.install_limit)

    def prepare(self) -> None:
        self._environment.make()
        hf_folder(self._place)

    def version(self) -> str:
        found = self._environment.versions("transformers", "torch")
        return f"{found['transformers']}, torch {found['torch']}"

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        return ("--batch", str(BATCH), "--threads", str(self._place.threads))

    @contextmanager
    def start(self, variant: Variant, settings: Sequence[str]) -> Iterator[Driven]:
        command = [str(self._environment.python), str(DRIVER), str(hf_folder(self._place)), *settings]
        env = {"HF_HUB_OFFLINE": "1"}
        with driven(command, self._place.log("transformers"), env=env) as session:
            yield session
