"""Whether a server can be trusted: some minutes among clients that do all that they should not.

python benchmarks/hostile.py --minutes 5 --concurrency 100 --seed 1

Starts `noria serve`, learns the answers to a set of requests, sends the attacks of `hostile_attacks` for some minutes
while well-behaved clients go on asking, and then demands: /health and /ready answered within 100 ms throughout, every
well-behaved request answered as before, memory of both processes within 5 % of where it was, no block held, every
accepted request ended, no error of the server's own. Exit status 1: a demand is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hostile_attacks import ATTACKS, Attack, Scene
from hostile_bodies import COMPLETIONS
from hostile_good import Good
from hostile_wire import Wire, head, post
from serving import free_port, noria_command, running

HEALTH_SECONDS = 0.1
MEMORY_SHARE = 0.05
ATTACK_SECONDS = 300.0  # after which an attack that has no answer tells that; a large request may wait and run for long
CLIENTS = 8  # well-behaved ones
WARM_REQUESTS = 400
WARM_ROUNDS = 5  # of all well-behaved requests at once
SETTLE_SECONDS = 90.0  # that a server has to finish what it took, once all clients are gone
QUIET_SECONDS = 10.0  # after that, before memory is measured
FINE = {"left", "closed"}  # ends of an attack that are no status
BLOCKS = 1024  # of the cache: as many as warming up can fill, so that memory does not grow for a good reason


@dataclass(slots=True)
class Demands:
    """What is demanded, and whether it was met."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def add(self, name: str, found: str, met: bool) -> None:
        """One demand."""
        self.rows.append((name, found, met))

    @property
    def met(self) -> bool:
        """Whether all were."""
        return all(met for _, _, met in self.rows)

    def show(self) -> None:
        """Prints them."""
        for name, found, met in self.rows:
            print(f"{'met   ' if met else 'BROKEN'}  {name:<42} {found}")


async def metrics(port: int) -> dict[str, float]:
    """The page of metrics: name with labels (but the model's) → value."""
    async with Wire(port) as wire:
        await wire.send(head("GET", "/metrics", {}))
        page = (await wire.reply()).body.decode()
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name, _, labels = name.partition("{")
            kept = ",".join(part for part in labels.rstrip("}").split(",") if part and "model_name" not in part)
            found[f"{name}{{{kept}}}" if kept else name] = float(value)
    return found


def engine_of(server: psutil.Process) -> psutil.Process | None:
    """The engine of a server, if there is one just now."""
    for child in server.children():
        with contextlib.suppress(psutil.Error):
            if "noria.engine.process" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def memory(server: psutil.Process) -> dict[str, int]:
    """Resident bytes of the API process and of its engine."""
    engine = engine_of(server)
    assert engine is not None, "the engine is gone"
    return {"API": server.memory_info().rss, "engine": engine.memory_info().rss}


async def warm(port: int, scene: Scene, good: Good) -> None:
    """Normal load of as many callers as will attack, so that what is made at first need is there: the cache is filled,
    every endpoint was used, and both processes have the size of a server in use."""
    await good.learn()
    for _ in range(WARM_ROUNDS):
        await asyncio.gather(*(good.ask(*pair) for pair in good.known))
    async with Wire(port) as wire:
        for path, body in (
            ("/tokenize", {"prompt": " ".join(map(str, range(100_000)))}),
            ("/tokenize", {"prompt": " ".join(map(_word, range(20_000)))}),  # a tokeniser remembers some 10,000 words
            (COMPLETIONS, {"prompt": scene.ids(2000), "max_tokens": 2, "logprobs": 20, "echo": True}),
            (COMPLETIONS, {"prompt": [scene.ids(20), scene.ids(20)], "max_tokens": 8, "n": 128, "ignore_eos": True}),
        ):
            await wire.send(post(path, body))
            await wire.reply()

    async def one(count: int) -> None:
        body = {"prompt": scene.ids(count), "max_tokens": 32, "ignore_eos": True, "stream": count % 2 == 0}
        async with Wire(port) as wire:
            await wire.send(post(COMPLETIONS, body))
            await wire.reply()

    gate = asyncio.Semaphore(100)

    async def gated(count: int) -> None:
        async with gate:
            await one(count)

    await asyncio.gather(*(gated(scene.random.randrange(16, 400)) for _ in range(WARM_REQUESTS)))


def _word(number: int) -> str:
    """A word of its own for each number."""
    return "".join(chr(97 + number // 26**place % 26) for place in range(4))


async def attack(scene: Scene, seen: Mapping[str, Counter[str]], end: asyncio.Event) -> None:
    """One hostile client: one attack after the other."""
    kinds = [kind for kind, _ in ATTACKS]
    often = [weight for _, weight in ATTACKS]
    while not end.is_set():
        (kind,) = scene.random.choices(kinds, often)
        seen[kind.__name__][await outcome(kind, scene)] += 1


async def outcome(kind: Attack, scene: Scene) -> str:
    """How an attack ended, in a word."""
    try:
        return await asyncio.wait_for(kind(scene), ATTACK_SECONDS)
    except asyncio.TimeoutError:
        return "no answer"
    except ConnectionRefusedError:
        return "refused to connect"
    except (OSError, EOFError):
        return "closed"


async def besiege(port: int, scene: Scene, good: Good, minutes: float, concurrency: int) -> dict[str, Counter[str]]:
    """The hostile minutes. Returns the attacks' ends by kind."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    end = asyncio.Event()
    clients = [asyncio.create_task(good.work(end)) for _ in range(CLIENTS)]
    attackers = [asyncio.create_task(attack(scene, seen, end)) for _ in range(concurrency)]
    await asyncio.sleep(60 * minutes)
    end.set()
    for task in attackers:
        task.cancel()  # and their connections with them
    await asyncio.gather(*attackers, return_exceptions=True)
    await asyncio.gather(*clients)
    for task in attackers:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return seen


async def settle(port: int) -> dict[str, float]:
    """Waits until nothing runs any more; the metrics then."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = await metrics(port)
        busy = found["noria_num_requests_running"] + found["noria_num_requests_waiting"]
        if busy == 0 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(QUIET_SECONDS)
    return await metrics(port)


def judge_probes(demands: Demands, probes: dict[str, Any]) -> None:
    """/health and /ready."""
    late = sorted(probes.pop("late"))
    for path, seen in probes.items():
        times = sorted(seconds for _, seconds, _ in seen)
        bad = sum(status != 200 for _, _, status in seen)
        over = sum(seconds > HEALTH_SECONDS for seconds in times)
        figures = ", ".join(f"{name} {1000 * times[int(q * (len(times) - 1))]:.1f}" for name, q in QUANTILES.items())
        found = f"{figures} ms; {over} of {len(times)} over, {bad} not 200"
        demands.add(f"{path} within {1000 * HEALTH_SECONDS:.0f} ms", found, over == 0 and bad == 0)
    most, usual = 1000 * late[-1], 1000 * late[int(0.99 * len(late))]
    print(f"the probes themselves were woken late by up to {most:.1f} ms (99 %: {usual:.1f})")


QUANTILES = {"median": 0.5, "99 %": 0.99, "most": 1.0}


def judge_memory(demands: Demands, before: dict[str, int], after: dict[str, int]) -> None:
    """Both processes."""
    for name, start in before.items():
        growth = after[name] / start - 1
        found = f"{start / 1e6:.0f} → {after[name] / 1e6:.0f} MB ({100 * growth:+.1f} %)"
        demands.add(f"memory of the {name} process within 5 %", found, growth <= MEMORY_SHARE)


def judge_metrics(demands: Demands, found: dict[str, float]) -> None:
    """What the server says of itself once all is over."""
    held = found["noria_kv_cache_held_blocks"]
    demands.add("no blocks held", f"{held:.0f}", held == 0)
    accepted = found.get("noria_request_accepted_total", -1)
    ends = {
        name.partition('finished_reason="')[2].rstrip('"}'): value
        for name, value in found.items()
        if name.startswith("noria_request_success_total")
    }
    shown = " + ".join(f"{value:.0f} {reason}" for reason, value in ends.items())
    demands.add("accepted = Σ finish reasons", f"{accepted:.0f} = {shown}", accepted == sum(ends.values()))
    restarts = found["noria_engine_restarts_total"]
    demands.add("the engine lives", f"{restarts:.0f} restarts", restarts == 0)


def judge_attacks(demands: Demands, seen: dict[str, Counter[str]]) -> None:
    """Each attack ends as it may: with a clear answer, or a closed connection."""
    for kind in sorted(seen):
        print(f"  {kind:<34} " + ", ".join(f"{end}: {count}" for end, count in sorted(seen[kind].items())))
    odd: Counter[str] = Counter()
    for ends in seen.values():
        odd.update({end: count for end, count in ends.items() if not _is_fine(end)})
    demands.add("every attack gets a clear end", ", ".join(f"{end}: {n}" for end, n in odd.items()) or "yes", not odd)


def _is_fine(end: str) -> bool:
    return end in FINE or (end.isdigit() and (int(end) < 500 or end == "503"))


async def trial(args: argparse.Namespace, port: int, pid: int, demands: Demands) -> None:
    """All of it, against a server that runs."""
    async with Wire(port) as wire:
        await wire.send(head("GET", "/v1/models", {}))
        model = json.loads((await wire.reply()).body)["data"][0]
    scene = Scene(port, random.Random(args.seed), model["max_model_len"])
    good = Good(port, random.Random(args.seed + 1))
    await warm(port, scene, good)
    await asyncio.sleep(QUIET_SECONDS / 2)
    server = psutil.Process(pid)
    before = memory(server)
    right = good.right
    command = [sys.executable, str(Path(__file__).with_name("hostile_probe.py")), str(port)]
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = await besiege(port, scene, good, args.minutes, args.concurrency)
    found = await settle(port)
    told, _ = await asyncio.to_thread(probe.communicate)
    after = memory(server)
    judge_attacks(demands, seen)
    judge_probes(demands, json.loads(told))
    judge_memory(demands, before, after)
    judge_metrics(demands, found)
    waits = ", ".join(f"{count} times {status}" for status, count in good.waits.items())
    demands.add(
        "well-behaved requests answered right",
        f"{good.right - right} right, {len(good.wrong)} wrong ({waits})",
        not good.wrong,
    )
    for wrong in good.wrong[:5]:
        print("wrong:", wrong[:1000])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without the server that was started
    port, log, demands = free_port(), Path("build/bench/hostile.log"), Demands()
    command = noria_command(args.model, port, "--num-blocks", str(BLOCKS))
    with running(command, f"http://127.0.0.1:{port}", log) as server:
        asyncio.run(trial(args, port, server.pid, demands))
    complaints = Counter(line[9:40] for line in log.read_text(errors="replace").splitlines() if " error " in line[:20])
    traces = log.read_text(errors="replace").count("Traceback")
    demands.add(
        "no error in the server's log", f"{traces} tracebacks; {dict(complaints)}", not traces and not complaints
    )
    print(f"{args.minutes:g} minutes, {args.concurrency} at a time, seed {args.seed}, {platform.machine()}")
    demands.show()
    raise SystemExit(0 if demands.met else 1)


if __name__ == "__main__":
    main()
