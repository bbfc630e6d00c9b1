"""OpenVINO GenAI in this machine's best settings for it: int8 weights, continuous batching, in process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peers.base import Load, Place, Variant
from peers.convert import hf_folder
from peers.environment import Environment, run_logged
from peers.sessions import Driven, driven

DRIVER = Path(__file__).parent / "drivers" / "openvino_genai_loop.py"
CACHE_GB = 3


class OpenVino:
    """See `base.Peer`."""

    name = "OpenVINO GenAI"
    how = "in process"
    variants = (Variant("int8", "int8 (activations too)", "u8", ("int8",)),)

    def __init__(self, place: Place) -> None:
        self._place = place
        self._folder = place.folder("openvino")
        # torch first and pinned: what comes after it would take one with CUDA.
        packages = [["torch==2.13.0"], ["openvino-genai", "optimum-intel[openvino]"]]
        # The export tools ask for torchvision, which need not fit that torch, and which a language model does not need.
        self._environment = Environment(self._folder / "env", packages, place.install_limit, ["torchvision"])

    def prepare(self) -> None:
        self._environment.make()
        target = self._folder / "model"
        if (target / "openvino_model.xml").exists():
            return
        export = [str(self._environment.folder / "bin" / "optimum-cli"), "export", "openvino"]
        export += ["--task", "text-generation-with-past", "--weight-format", "int8"]
        export += ["--model", str(hf_folder(self._place)), str(target)]
        run_logged(export, self._folder / "export.log", time.monotonic() + 900)

    def version(self) -> str:
        found = self._environment.versions("openvino-genai", "openvino")
        return f"{found['openvino-genai']}, openvino {found['openvino']}"

    def settings(self, variant: Variant, load: Load) -> tuple[str, ...]:
        scheduler = {
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 256,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": load.spec.shared > 0,
            "cache_size": CACHE_GB,
        }
        properties = {
            "INFERENCE_NUM_THREADS": self._place.threads,
            "KV_CACHE_PRECISION": "u8",
            "PERFORMANCE_HINT": "LATENCY",
        }
        return (json.dumps({"scheduler": scheduler, "properties": properties}),)

    @contextmanager
    def start(self, variant: Variant, settings: Sequence[str]) -> Iterator[Driven]:
        command = [str(self._environment.python), str(DRIVER), str(self._folder / "model"), *settings]
        with driven(command, self._place.log("openvino")) as session:
            yield session
