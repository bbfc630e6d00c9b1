"""Asks transformers and PyTorch, live, and stores what they say for `make test`, which has neither.

Run by `make parity` in an environment of its own. Writes `oracle/ARCHITECTURE.npz` (tiny random checkpoints: logits at
some positions and a greedy continuation) and `oracle/smollm2.json` (real prompts, greedy, in float32), then runs the
stored checks against what was just written.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from helpers.tiny_models import CASES, write_checkpoint  # noqa: E402
from noria.files.resolve import resolve  # noqa: E402
from noria.frontend.tokenizer import load_tokenizer  # noqa: E402

PROMPT_TOKENS = 48  # longer than the windows of the tiny models
NEW_TOKENS = 24
LOGIT_ROWS = (0, 1, 15, 16, 17, 31, 40, 47)


def tiny(name: str) -> dict[str, Any]:
    """Logits and a greedy continuation of one tiny checkpoint, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(name, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        vocab = model.config.get_text_config().vocab_size
        prompt = np.random.default_rng(7).integers(0, vocab, PROMPT_TOKENS)
        with torch.no_grad():
            logits = model(torch.from_numpy(prompt)[None]).logits[0].numpy()
            tokens, gaps = greedy(model, prompt.tolist(), NEW_TOKENS)
    return {"prompt": prompt.astype(np.int32), "rows": np.array(LOGIT_ROWS), "logits": logits[list(LOGIT_ROWS)]} | {
        "greedy": np.array(tokens, np.int32),
        "gaps": np.array(gaps, np.float32),
    }


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, end tokens not minded, and each one's lead over the runner-up in logits."""
    ids = torch.tensor([prompt])
    cache = None
    tokens, gaps = [], []
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        top = out.logits[0, -1].topk(2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        ids = top.indices[None, :1]
    return tokens, gaps


def smollm2() -> dict[str, Any]:
    """Twenty prompts, 64 greedy tokens each, of the demo model dequantised to float32 by transformers' own reader."""
    files = resolve("smollm2")
    tokenizer = load_tokenizer(files)
    model = AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    cases = []
    for prompt in json.loads((HERE / "prompts.json").read_text(encoding="utf-8")):
        ids = tokenizer.encode(prompt, add_bos=True)
        with torch.no_grad():
            tokens, gaps = greedy(model, ids, 64)
        cases.append({"prompt_ids": ids, "tokens": tokens, "smallest_gap": min(gaps)})
    return {"model": files.path.name, "cases": cases}


def main() -> int:
    torch.manual_seed(0)
    folder = HERE / "oracle"
    folder.mkdir(exist_ok=True)
    for name in CASES:
        np.savez_compressed(folder / f"{name}.npz", **tiny(name))
        print(f"stored {name}")
    (folder / "smollm2.json").write_text(json.dumps(smollm2()) + "\n", encoding="utf-8")
    print("stored smollm2")
    import pytest

    return pytest.main([str(HERE), "-q", "-s", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main())
