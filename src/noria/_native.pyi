"""The native extension, made of csrc/. Its own docstrings say what its functions take."""

from typing import Any

def __getattr__(name: str) -> Any: ...
