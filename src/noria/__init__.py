"""Noria: an LLM inference server with native kernels and continuous batching."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noria.params import SamplingParams

if TYPE_CHECKING:
    from noria import grammar
    from noria.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "grammar"]


def __getattr__(name: str) -> Any:
    # LLM pulls in the engine and the kernels; `noria --help` must not wait for them.
    if name == "LLM":
        from noria.llm import LLM

        return LLM
    if name == "grammar":
        return importlib.import_module("noria.grammar")
    raise AttributeError(f"module 'noria' has no attribute {name!r}")
