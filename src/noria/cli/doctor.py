"""`noria doctor`: what this machine has, what Noria would run on it, and what looks wrong."""

from __future__ import annotations

import importlib.metadata
import json as json_module
import os
import platform
from typing import Annotated, Any

import typer

import noria
from noria.errors import ConfigError

GIB = 1024**3
# Levels that Noria's kernels know and what they bring, best first.
LEVELS = {
    "amx": "AVX-512 with VNNI, AMX tiles for int8 and BF16",
    "avx512_bf16": "AVX-512 with VNNI and BF16",
    "avx512": "AVX-512 with VNNI",
    "avx2": "AVX2",
    "baseline": "x86-64-v2 (SSE4.2)",
    "neon_i8mm": "NEON with dot products, i8mm and BF16",
    "neon": "NEON with dot products",
}


def doctor_command(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show CPU, instruction set, threads, limits and memory, and what would run here."""
    found = examine()
    if json:
        typer.echo(json_module.dumps(found, indent=2))
    else:
        _print(found)


def examine() -> dict[str, Any]:
    """Everything that doctor knows, as plain data."""
    try:
        from noria import _native
    except ImportError as error:
        raise ConfigError(f"the native kernels cannot be loaded ({error}); build them with `pip install .`") from error
    try:
        isa: str = _native.isa()
    except ValueError as error:  # NORIA_ISA names a level that is unknown, or that this processor lacks
        raise ConfigError(str(error), "NORIA_ISA") from None
    topology: dict[str, Any] = _native.topology()
    return {
        "noria": noria.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "isa": isa,
        "available_isas": list(_native.available_isas()),
        "forced_isa": os.environ.get("NORIA_ISA") or None,
        "machine": topology,
        "models": _pulled(),
        "packages": {name: _version(name) for name in ("numpy", "tokenizers", "msgspec", "uvicorn")},
        "warnings": _warnings(isa, topology),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pulled() -> list[str]:
    from noria.files.resolve import models_dir

    folder = models_dir()
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _warnings(isa: str, machine: dict[str, Any]) -> list[str]:
    found = []
    if isa == "baseline":
        found.append(
            "only the slowest kernels can run on this processor: expect a small share of a current CPU's speed"
        )
    if os.environ.get("NORIA_ISA"):
        found.append("NORIA_ISA is set: the instruction set is forced, not chosen")
    limit = machine["cgroup_cpus"]
    if limit and limit < machine["physical_cores"]:
        found.append(f"a container limit of {limit:g} processors is below the {machine['physical_cores']} cores here")
    if machine["memory_available_bytes"] < 1 * GIB:
        found.append("less than 1 GiB of memory is available: only the smallest models fit")
    return found


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = found["machine"]
    limit = f", container limit {machine['cgroup_cpus']:g}" if machine["cgroup_cpus"] else ""
    memory = f"{machine['memory_available_bytes'] / GIB:.1f} GiB available of {machine['memory_bytes'] / GIB:.1f}"
    if machine["memory_limit_bytes"]:
        memory += f", container limit {machine['memory_limit_bytes'] / GIB:.1f}"
    levels = ", ".join(reversed(found["available_isas"]))
    rows = {
        "noria": f"{found['noria']} on Python {found['python']}, {found['system']}",
        "processor": machine["cpu_model"] or "unknown",
        "cores": f"{machine['physical_cores']} physical, {len(machine['cpus'])} logical allowed{limit}",
        "caches": _caches(machine),
        "memory": memory,
        "NUMA nodes": str(len(machine["nodes"]) or 1),
        "kernels": f"{found['isa']} ({LEVELS.get(found['isa'], 'unknown')}); levels here: {levels}",
        "threads": f"{machine['threads']} (change with --threads)",
        "models": ", ".join(found["models"]) or "none pulled yet: noria pull smollm2",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    console = Console()
    console.print(table)
    for warning in found["warnings"]:
        console.print(f"[yellow]! {warning}[/]")
    if not found["warnings"]:
        console.print("[green]Ready to serve:[/] noria serve smollm2")


def _caches(machine: dict[str, Any]) -> str:
    def size(value: int) -> str:
        return f"{value / 2**20:g} MiB" if value >= 2**20 else f"{value / 2**10:g} KiB"

    names = (("L1", "l1d_bytes"), ("L2", "l2_bytes"), ("L3", "l3_bytes"))
    return ", ".join(f"{name} {size(machine[key])}" for name, key in names if machine[key]) or "unknown"
