"""Perplexity of every engine in every one of its variants, on the same windows: what its speed was paid with.

PYTHONPATH=benchmarks python -m peers.perplexity --text english.txt --chunks 24

Windows and scored tokens are those of llama.cpp's own program, since it takes no others: the text is cut into chunks
of 512 tokens one after the other, and of each the last 255 are scored. vLLM is asked for its prompts' log-probabilities
over HTTP, OpenVINO GenAI and transformers in process, with the weights and the cache type that are measured. Results
are kept one by one; what is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from noria.backends import get_backend
from noria.bench.perplexity import Evaluator, model_options
from noria.errors import NoriaError
from noria.files.resolve import resolve
from noria.frontend.tokenizer import load_tokenizer
from noria.models.loaders import open_checkpoint
from noria.quantize.schemes import choose_cache_type
from peers.base import Load, Place, Unavailable, Variant
from peers.llama_cpp import LlamaCpp
from peers.openvino import OpenVino
from peers.runner import Loads, Plan, reason
from peers.schedule import label
from peers.sessions import Served
from peers.transformers import Transformers
from peers.vllm import Vllm

LENGTH = 512
FIRST = LENGTH // 2  # its logits are the first that count
Windows = list[list[int]]
NORIA = {"stored": "auto", "int8": "int8", "bf16": "bf16"}


def cut(place: Place, text: str, chunks: int) -> Windows:
    """Raises Unavailable: the text is too short."""
    tokenizer = load_tokenizer(place.files)
    ids = tokenizer.encode(text, add_bos=True)
    if len(ids) < chunks * LENGTH:
        raise Unavailable(f"the text has {len(ids)} tokens, {chunks} chunks have {chunks * LENGTH}")
    windows = [ids[start : start + LENGTH] for start in range(0, chunks * LENGTH, LENGTH)]
    if tokenizer.bos_id is not None and ids[0] == tokenizer.bos_id:
        windows = [[tokenizer.bos_id, *window[1:]] for window in windows]
    return windows


def perplexity(log_probs: Sequence[Sequence[float]]) -> float:
    """Of log-probabilities of each window's tokens, of all but the first."""
    scored = [value for window in log_probs for value in window[FIRST:]]
    return math.exp(-sum(scored) / len(scored))


def noria(place: Place, variant: str, windows: Windows) -> float:
    checkpoint = open_checkpoint(place.files)
    options = model_options(place.files.name, NORIA[variant])
    evaluator = Evaluator(checkpoint, get_backend("cpu", place.threads), options, LENGTH)
    cache = choose_cache_type("auto", "auto", checkpoint.config.head_dim)
    return perplexity(evaluator.score(np.array(windows, np.int32), cache).log_probs.tolist())


def llama_cpp(peer: LlamaCpp, variant: Variant, text: Path, chunks: int, threads: int) -> float:
    command = [str(peer.program("llama-perplexity")), "-m", str(peer.model(variant.name)), "-f", str(text)]
    command += ["-c", str(LENGTH), "--chunks", str(chunks), "-t", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise Unavailable(f"llama-perplexity said no result: {(done.stdout + done.stderr)[-300:]}")
    return float(found[1])


def vllm(session: Served, windows: Windows) -> float:
    rows = []
    with httpx.Client(trust_env=False, timeout=300.0) as client:
        model = client.get(f"{session.url}/v1/models").json()["data"][0]["id"]
        for window in windows:
            body = {"model": model, "prompt": window, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = client.post(f"{session.url}/v1/completions", json=body).raise_for_status().json()
            found = answer["choices"][0]["prompt_logprobs"]
            rows.append([each[str(token)]["logprob"] for each, token in zip(found[1:], window[1:], strict=True)])
    return perplexity(rows)


class Book:
    """The file of results."""

    def __init__(self, path: Path, about: dict[str, Any], forget: Sequence[str] = ()) -> None:
        """`forget`: beginnings of names whose values are measured again. Raises Unavailable: of another text."""
        self._path = path
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if known and known["about"] != about:
            raise Unavailable(f"{path} was measured on something else: delete it, or name another --output")
        values = known.get("perplexity", {})
        self.values: dict[str, float] = {
            name: value for name, value in values.items() if not name.startswith(tuple(forget))
        }
        self._about = about

    def take(self, name: str, measure: Callable[[], float]) -> None:
        """Measures it unless it is known; says so when that does not succeed."""
        if name in self.values:
            return
        try:
            self.values[name] = round(measure(), 4)
        except (Unavailable, NoriaError, OSError, subprocess.SubprocessError, httpx.HTTPError, KeyError) as error:
            print(f"{name}: {reason(error)}", file=sys.stderr, flush=True)
            return
        print(f"{name}: {self.values[name]}", file=sys.stderr, flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": self._about, "perplexity": self.values}, indent=1)
        self._path.write_text(text + "\n", encoding="utf-8")


def measure(place: Place, engines: Sequence[str], text: Path, windows: Windows, book: Book) -> None:
    chunks = len(windows)
    if "noria" in engines:
        for variant in NORIA:
            book.take(label("Noria", variant), partial(noria, place, variant, windows))
    if "llama.cpp" in engines:
        peer = LlamaCpp(place)
        peer.prepare()
        for form in peer.variants:
            name = label(peer.name, form.name)
            book.take(name, partial(llama_cpp, peer, form, text, chunks, place.threads))
    load = Loads(place, Plan(("W2",), 1, 300.0)).of("W2", 0)
    for key, other in (("openvino", OpenVino(place)), ("transformers", Transformers(place)), ("vllm", Vllm(place))):
        if key in engines:
            for form in other.variants:
                name = label(other.name, form.name)
                book.take(name, partial(_running, other, form, load, place, windows))


def _running(
    peer: OpenVino | Transformers | Vllm, variant: Variant, load: Load, place: Place, windows: Windows
) -> float:
    peer.prepare()
    with peer.start(variant, peer.settings(variant, load)) as session:
        if isinstance(session, Served):
            return vllm(session, windows)
        return perplexity(session.score(windows, place.folder("scratch"), 600.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--engines", default="noria,llama.cpp,openvino,transformers,vllm")
    parser.add_argument("--again", default="", help="beginnings of rows to measure again, such as Noria,vLLM")
    parser.add_argument("--threads", type=int, default=get_backend("cpu", None).threads)
    parser.add_argument("--root", type=Path, default=Path("build/peers"))
    parser.add_argument("--output", type=Path, default=Path("build/bench/peers.perplexity.json"))
    args = parser.parse_args()
    try:
        place = Place(args.root, args.model, resolve(args.model), args.threads)
        text = args.text.read_text(encoding="utf-8")
        windows = cut(place, text, args.chunks)
        about = {"model": args.model, "text": args.text.name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        about |= {"chunks": args.chunks, "scored": args.chunks * (FIRST - 1)}
        book = Book(args.output, about, [name for name in args.again.split(",") if name])
        measure(place, args.engines.split(","), args.text, windows, book)
    except (NoriaError, Unavailable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
