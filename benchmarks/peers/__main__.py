"""Runs the preset workloads on Noria and on other engines in turns and writes one table.

make bench-peers
PYTHONPATH=benchmarks python -m peers --peers llama.cpp,vllm --presets W1,W2 --repeat 3

Every measurement is kept as soon as it is done: the same command again takes up what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from noria.bench.report import machine
from noria.bench.workloads import presets
from noria.errors import NoriaError
from noria.files.pull import pull
from noria.files.resolve import resolve
from peers import table
from peers.base import Peer, Place
from peers.llama_cpp import LlamaCpp
from peers.noria import Noria
from peers.openvino import OpenVino
from peers.runner import Plan, Runner, terminate
from peers.store import Store
from peers.transformers import Transformers
from peers.vllm import Vllm

PEERS = {"llama.cpp": LlamaCpp, "vllm": Vllm, "openvino": OpenVino, "transformers": Transformers}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model that Noria has; pulled if it has a short name")
    parser.add_argument("--peers", default=",".join(PEERS), help="engines, separated by commas")
    parser.add_argument("--variants", default="", help="only these of theirs, such as Q4_0,bf16 (default: all)")
    parser.add_argument("--presets", default="W1,W2,W3,W5,W4", help="in the order of measuring")
    parser.add_argument("--repeat", type=int, default=3, help="turns")
    parser.add_argument("--everything", action="store_true", help="every variant on every preset in every turn")
    parser.add_argument("--minutes", type=float, help="begin nothing that would not end within so many")
    parser.add_argument("--requests", type=int, help="at most so many requests a preset: a quick look, not a result")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one measurement may take")
    parser.add_argument("--install-limit", type=float, default=3600.0, help="seconds that one installation may take")
    parser.add_argument("--threads", type=int, help="compute threads of every engine (default: as Noria chooses)")
    parser.add_argument("--perplexity", type=Path, help="JSON of peers.perplexity, fills the column")
    parser.add_argument(
        "--llama-bin", type=Path, help="folder with llama-server and llama-quantize, instead of a build"
    )
    parser.add_argument("--root", type=Path, default=Path("build/peers"), help="environments and converted models")
    parser.add_argument("--store", type=Path, default=Path("build/bench/peers.runs"), help="folder of measurements")
    parser.add_argument("--output", type=Path, default=Path("build/bench/peers"), help="the table, without suffix")
    args = parser.parse_args()
    for flag, given, known in (("--peers", args.peers, PEERS), ("--presets", args.presets, presets())):
        if unknown := [name for name in given.split(",") if name and name not in known]:
            parser.error(f"{flag}: there is no {unknown[0]!r}; there are {', '.join(known)}")
    if args.repeat < 1 or (args.requests or 1) < 1:
        parser.error("--repeat and --requests must be at least 1")
    return args


def main() -> int:
    args = parse()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, terminate)
    try:
        if args.model == "smollm2":
            pull(args.model)
        files = resolve(args.model)
        perplexity = json.loads(args.perplexity.read_text(encoding="utf-8")) if args.perplexity else {}
        perplexity = perplexity.get("perplexity", perplexity)  # as peers.perplexity writes it, or plain
    except (NoriaError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    where = machine() | {"model": args.model, "cores": os.cpu_count(), "requests": args.requests}
    threads = args.threads or where["threads"] or os.cpu_count() or 1
    where["threads"] = threads
    place = Place(args.root, args.model, files, threads, args.install_limit, args.llama_bin)
    engines: list[Peer] = [Noria(place), *(PEERS[name](place) for name in args.peers.split(",") if name)]
    seconds = 60.0 * args.minutes if args.minutes else float("inf")
    plan = Plan(
        tuple(args.presets.split(",")), args.repeat, args.limit, args.requests, seconds, everything=args.everything
    )
    runner = Runner(
        place, engines, plan, Store(args.store), where, lambda line: print(line, file=sys.stderr, flush=True)
    )
    try:
        runner.run([name for name in args.variants.split(",") if name])
    finally:
        print(table.write(args.output, runner.report, engines, where, perplexity))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
