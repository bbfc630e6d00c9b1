"""Noria itself, served over HTTP by this environment, as the other engines are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from serving import free_port, noria_command

import noria
from noria.models.loaders import open_checkpoint
from noria.quantize.schemes import choose_cache_type
from peers.base import Load, Place, Variant
from peers.sessions import Served, served

BENCH = (sys.executable, "-m", "noria.cli.main", "bench", "serve")
# Variants by the name that other engines call them by → what `--quantization` is told.
QUANTIZATION = {"stored": "auto", "int8": "int8", "bf16": "none"}


class Noria:
    """See `base.Peer`. `stored`: the weights as the file holds them."""

    name = "Noria"
    how = "HTTP"

    def __init__(self, place: Place) -> None:
        self._place = place
        config = open_checkpoint(place.files).config
        cache = choose_cache_type("auto", "auto", config.head_dim)
        schemes = {"stored": f"{config.stored_dtype} as stored", "int8": "int8", "bf16": "bf16"}
        self.variants = tuple(Variant(name, schemes[name], cache) for name in QUANTIZATION)

    def prepare(self) -> None:
        """It is what runs this."""

    def version(self) -> str:
        return noria.__version__

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        return ("--quantization", QUANTIZATION[variant.name], "--threads", str(self._place.threads))

    @contextmanager
    def start(self, variant: Variant, settings: Sequence[str]) -> Iterator[Served]:
        port = free_port()
        command = noria_command(self._place.model, port, *settings)
        log = self._place.log(f"noria-{variant.name}")
        with served(command, port, log, BENCH, self._place.model) as session:
            yield session
