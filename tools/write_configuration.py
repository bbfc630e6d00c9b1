"""Writes docs/reference/configuration.md from the table of keys. A test fails while the file lags behind."""

from __future__ import annotations

from pathlib import Path

from noria.cli.keys import Key, plain
from noria.cli.schema import key_default
from noria.cli.sections import KEYS, SECTIONS

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"
_HEAD = """# Configuration files

`python tools/write_configuration.py` writes this page from `cli/sections.py`.

    noria serve smollm2 --config docs/examples/continuous_batching.yaml

A configuration file is YAML. It holds the sections below, the names of [flags](flags.md) (with dashes or
underscores), or both. [continuous_batching.yaml](../examples/continuous_batching.yaml) has every section of batching.

- `--config` may be given several times: later files win, key by key. Flags win over all files.
- What is wrong is an error before anything is loaded: it names the file, the line, the whole key and what is allowed.
  An unknown key is an error too, and the nearest known one is named. So are two keys of one file that say different
  things of the same setting, and a key that stands twice.
- A switch (`performance_optimization.enabled`, `monitoring.enabled`, `monitoring.logging_enabled`) that is false goes
  before the keys that it switches off.
- `engine_config.tensor_parallel_size` and `tensor_parallel.size` are the same: `--tensor-parallel-size` wins, then
  `tensor_parallel` if it is enabled, then `engine_config`. A size that this machine cannot have is refused, and both
  are named.
- Keys of what is not built yet (`moe`, `speculative_decoding`, tracing, more than one rank) are accepted while they
  are off; what they hold is checked.
- None of the keys changes a request's answer, except those that say how the model is held and how long a context may
  be.

Look at the result before you serve it:

    noria config show smollm2 --config docs/examples/continuous_batching.yaml --max-num-seqs 64
    noria config schema

The first prints every setting with its value and where that comes from: the default, a line of a file, or a flag. The
output is a configuration file itself (API keys and passwords are left out); `--json` prints the same for programs.
The second prints the JSON schema of a file (draft 2020-12), for editors that complete and check.
"""
_COLUMNS = "| key | what it does | when to touch it | value | default | flag |\n|---|---|---|---|---|---|"


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", key.text, key.advice, key.allowed, f"`{plain(key_default(key))}`", _flag(key))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag(key: Key) -> str:
    """The flag of the same meaning, or what is nearest to it."""
    if not key.setting:
        return ", ".join(f"`{_spelled(name, value)}`" for name, value in key.when_false) if key.when_false else ""
    if key.setting.startswith("rules."):
        return "`rules` in a file"
    if key.kind is not bool:
        return f"`{_dashed(key.setting)}`"
    off = key.to_setting(False)
    return f"`{_spelled(key.setting, off)}` for false"


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spelled(name: str, value: object) -> str:
    """A flag that gives a setting a value."""
    if isinstance(value, bool):
        return _dashed(name) if value else _dashed(f"no_{name}")
    return f"{_dashed(name)} {value}"


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for section, text in SECTIONS.items():
        keys = [key for key in KEYS.values() if key.path.rpartition(".")[0] == section]
        head = f"## `{section}`\n\n{text}\n"
        if section == "rules":
            parts.append(head)
            continue
        rows = "\n".join(map(_row, keys))
        parts.append(f"{head}\n{_COLUMNS}\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
