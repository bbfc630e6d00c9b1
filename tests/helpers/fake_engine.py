"""The engine process over a FakeExecutor. The model's name says how it shall behave."""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.fake_executor import FakeExecutor
from noria.config import EngineOptions
from noria.engine import process
from noria.errors import ConfigError, WeightsError


class LocalExecutor(FakeExecutor):
    def __init__(self, options: EngineOptions) -> None:
        super().__init__(block_size=16, max_model_len=1024, num_blocks=256)
        self.name = options.model.model
        if self.name == "refused":
            raise ConfigError("no such model", "MODEL")
        if self.name == "damaged":
            raise WeightsError("the file is damaged")
        if self.name == "crash":
            self.fail_at = 3

    def collect(self):
        if self.name == "slow":
            time.sleep(0.05)
        return super().collect()

    def close(self) -> None:
        print("closed", flush=True)


sys.modules["noria.executor.local"] = types.SimpleNamespace(LocalExecutor=LocalExecutor)
status = process.main(sys.argv[1])
sys.stdout.flush()
os._exit(status)
