"""What a key of a configuration file does: options as a file makes them, and an engine that runs with those."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from helpers.engine_driver import Driver
from helpers.fake_executor import FakeExecutor
from noria.cli.resolve import options_of, resolve
from noria.config import EngineOptions, ServerOptions
from noria.engine.core import EngineCore


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@dataclass
class Set:
    """Sets one key in a file. `beside`: settings by the names of their flags."""

    path: str
    folder: Path
    model: str = "m"

    def options(self, value: Any, **beside: Any) -> tuple[EngineOptions, ServerOptions]:
        file = self.folder / "noria.yaml"
        file.write_text(yaml.safe_dump(nested(self.path, value)))
        _, engine, server = options_of(resolve([file], {"model": self.model} | beside))
        return engine, server

    def engine(self, value: Any, **beside: Any) -> EngineOptions:
        return self.options(value, **beside)[0]

    def server(self, value: Any) -> ServerOptions:
        return self.options(value)[1]


Effect = Callable[[Set], None]
EFFECTS: dict[str, Effect] = {}  # by key


def shows(*paths: str) -> Callable[[Effect], Effect]:
    """The function shows what these keys do."""

    def add(effect: Effect) -> Effect:
        EFFECTS.update(dict.fromkeys(paths, effect))
        return effect

    return add


class Noting(FakeExecutor):
    """Keeps what grammars it was asked to compile."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.asked: list[str] = []

    def compile_grammar(self, grammar: str) -> Future[str]:
        self.asked.append(grammar)
        return super().compile_grammar(grammar)


class Configured(Driver):
    """A driver of an engine with these options; its executor has no model."""

    def __init__(self, options: EngineOptions, *, clock=None, pacer=None, num_blocks=64, max_model_len=64) -> None:
        scheduler, cache = options.scheduler, options.cache
        self.executor = Noting(
            num_blocks=cache.num_blocks or num_blocks,
            block_size=cache.block_size,
            slots=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            budget=scheduler.max_num_batched_tokens,
        )
        timing = {"clock": clock} if clock else {}
        self.core = EngineCore(self.executor, cache, scheduler, pacer=pacer, **timing)
        self.seen = {}
        self.steps = 0

    def rows(self) -> list[int]:
        """How many rows each step so far had."""
        return [len(plan.slots) for plan in self.executor.plans]
