"""Whether an engine may die: killed, poisoned, stopped, and told to end while it works.

python benchmarks/deaths.py                        all four scenarios, with 200 requests, 100 at a time
python benchmarks/deaths.py --only kills --requests 40 --tokens 32

kills: the engine is killed (SIGKILL) five times while 200 requests run: half greedy, half sampled with penalties and a
seed, some of both held to a grammar, half streamed. All must finish, with the tokens of an undisturbed run.

poison: one request kills the engine whenever that runs it, and must end alone. No server has a switch for that, so it
is done from outside: the poison is the only request with a prompt of thousands of tokens, whose blocks are taken as a
whole when it is admitted. This script watches how many blocks are held, and kills the engine at once when they are so
many that the poison must be among them: many steps before it can have a token.

stall: the engine is stopped (SIGSTOP) under load. After the 30 s of the watchdog /ready must fail, the log tell what
waits, and another engine go on; /health stays.

stop: SIGTERM under load. New requests get 503 with Retry-After, those that run finish, the exit code is 0.

Exit status 1: something that is demanded did not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hostile import Demands, engine_of, metrics
from hostile_wire import Wire, head, post
from serving import free_port, noria_command, running

PATH = "/v1/completions"
KILLS = 5
POISON_TOKENS = 7000
POISON_SECONDS = 600.0
STALL_SECONDS = 90.0  # the watchdog's 30, and the start of another engine
LOGS = Path("build/bench")
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{2,9}){5,15}"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": RECORD}}},
)


@dataclass(slots=True)
class Answer:
    """What came of a request: token ids and reason, or what went wrong."""

    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    problem: str | None = None


@dataclass(slots=True)
class Target:
    """A server that runs."""

    port: int
    process: psutil.Process
    log: Path

    @property
    def engine(self) -> psutil.Process | None:
        """Its engine, if there is one just now."""
        return engine_of(self.process)

    def kill(self) -> bool:
        """Kills the engine; False: there was none."""
        engine = self.engine
        if engine is None:
            return False
        engine.kill()
        return True


def requests(count: int, tokens: int) -> list[dict[str, Any]]:
    """W1's shape: different prompts of 128 tokens, `tokens` out. Every eighth follows a grammar."""
    chance = random.Random(7)
    made: list[dict[str, Any]] = []
    for index in range(count):
        body: dict[str, Any] = {
            "prompt": [chance.randrange(100, 40_000) for _ in range(128)],
            "max_tokens": tokens,
            "stream": index % 4 < 2,
            "return_token_ids": True,
        }
        if index % 8 >= 6:
            body |= FORMS[index // 8 % len(FORMS)]
        else:
            body["ignore_eos"] = True
        penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}
        body |= {"temperature": 0.8, "top_p": 0.95, "seed": index, **penalties} if index % 2 else {"temperature": 0}
        made.append(body)
    return made


async def ask(port: int, body: dict[str, Any]) -> Answer:
    """One request, to its end."""
    try:
        async with Wire(port) as wire:
            await wire.send(post(PATH, body))
            reply = await wire.reply()
    except (OSError, EOFError) as error:
        return Answer(problem=f"{type(error).__name__}: {error}")
    if reply.status != 200:
        return Answer(problem=f"{reply.status}: {reply.body[:300]!r}")
    if not body.get("stream"):
        choice = json.loads(reply.body)["choices"][0]
        return Answer(choice["token_ids"], choice["finish_reason"])
    answer = Answer()
    events = [event.removeprefix(b"data: ") for event in reply.body.split(b"\n\n") if event]
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            answer.problem = str(event["error"])
            return answer
        choice = event["choices"][0]
        answer.ids += choice.get("token_ids") or []
        answer.reason = choice["finish_reason"] or answer.reason
    answer.problem = None if events[-1] == b"[DONE]" else "the stream has no end"
    return answer


async def ask_all(
    port: int, bodies: list[dict[str, Any]], at_once: int, finished: Callable[[int], None] = lambda count: None
) -> list[Answer]:
    """All of them, `at_once` at a time. `finished` is told how many have."""
    gate, count = asyncio.Semaphore(at_once), 0

    async def one(body: dict[str, Any]) -> Answer:
        nonlocal count
        async with gate:
            answer = await ask(port, body)
        count += 1
        finished(count)
        return answer

    return list(await asyncio.gather(*map(one, bodies)))


def compare(demands: Demands, name: str, expected: list[Answer], got: list[Answer]) -> None:
    """All finished, and with the tokens that they should have."""
    problems = [answer.problem for answer in got if answer.problem]
    same = sum(a.ids == b.ids and a.reason == b.reason for a, b in zip(expected, got, strict=True))
    for problem in problems[:3]:
        print(f"{name}: {problem}")
    demands.add(f"{name}: finished", f"{len(got) - len(problems)} of {len(got)}", not problems)
    demands.add(f"{name}: the tokens of an undisturbed run", f"{same} of {len(got)}", same == len(got))


async def reconcile(target: Target, demands: Demands, name: str, restarts: int) -> None:
    """What the server counted."""
    found = await metrics(target.port)
    ends = sum(value for key, value in found.items() if key.startswith("noria_request_success_total"))
    accepted = found["noria_request_accepted_total"]
    demands.add(f"{name}: accepted = Σ finish reasons", f"{accepted:.0f} = {ends:.0f}", accepted == ends)
    counted = found["noria_engine_restarts_total"]
    demands.add(f"{name}: engines started again", f"{counted:.0f}, killed {restarts}", counted == restarts)
    held = found["noria_kv_cache_held_blocks"]
    demands.add(f"{name}: no blocks held", f"{held:.0f}", held == 0)


async def kills(target: Target, demands: Demands, args: argparse.Namespace) -> None:
    bodies = requests(args.requests, args.tokens)
    expected = await ask_all(target.port, bodies, args.at_once)
    due = [args.requests * (2 * number + 1) // (2 * KILLS) for number in range(KILLS)]
    killed = 0

    def finished(count: int) -> None:
        nonlocal killed
        if killed < KILLS and count >= due[killed] and target.kill():
            killed += 1

    started = time.monotonic()
    got = await ask_all(target.port, bodies, args.at_once, finished)
    print(f"kills: {killed} engines killed within {time.monotonic() - started:.0f} s")
    compare(demands, "kills", expected, got)
    await reconcile(target, demands, "kills", KILLS)


async def poison(target: Target, demands: Demands, args: argparse.Namespace) -> None:
    bodies = requests(24, args.tokens)
    expected = await ask_all(target.port, bodies, 24)
    killed = 0
    chance = random.Random(11)
    venom = {"prompt": [chance.randrange(100, 40_000) for _ in range(POISON_TOKENS)], "max_tokens": 4}

    async def strike() -> None:
        nonlocal killed
        victim: psutil.Process | None = None  # what it said last may still be what is known when the next one starts
        while True:
            held = (await metrics(target.port))["noria_kv_cache_held_blocks"]
            if held >= POISON_TOKENS // 16 and target.engine != victim and (victim := target.engine) and target.kill():
                killed += 1
            await asyncio.sleep(0.02)

    striker = asyncio.create_task(strike())
    others = asyncio.create_task(ask_all(target.port, bodies, 24))
    end = await asyncio.wait_for(ask(target.port, venom), POISON_SECONDS)
    got = await others
    striker.cancel()
    print(f"poison: {killed} engines died of it; it ended with {end.problem}")
    demands.add("poison: ends in error", str(end.problem)[:50], end.problem is not None and killed >= 2)
    compare(demands, "poison: the others", expected, got)
    await reconcile(target, demands, "poison", killed)


async def stall(target: Target, demands: Demands, args: argparse.Namespace) -> None:
    bodies = requests(24, args.tokens)
    expected = await ask_all(target.port, bodies, 24)
    statuses: dict[str, set[int]] = {"/health": set(), "/ready": set()}

    async def watch(path: str) -> None:
        while True:
            async with Wire(target.port) as wire:
                await wire.send(head("GET", path, {}))
                statuses[path].add((await wire.reply()).status)
            await asyncio.sleep(0.05)

    watches = [asyncio.create_task(watch(path)) for path in statuses]
    waiting = asyncio.create_task(ask_all(target.port, bodies, 24))
    while (await metrics(target.port))["noria_num_requests_running"] < 20:
        await asyncio.sleep(0.05)
    engine = target.engine
    assert engine is not None
    engine.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    got = await asyncio.wait_for(waiting, STALL_SECONDS + POISON_SECONDS)
    print(f"stall: all answered {time.monotonic() - stopped:.0f} s after the engine was stopped")
    for task in watches:
        task.cancel()
    compare(demands, "stall", expected, got)
    demands.add(
        "stall: /health stays, /ready fails and returns",
        str(statuses),
        statuses == {"/health": {200}, "/ready": {200, 503}},
    )
    told = "nothing has run for" in target.log.read_text(errors="replace")
    demands.add("stall: the log tells what waited", "yes" if told else "no", told)
    await reconcile(target, demands, "stall", 1)


async def stop(target: Target, demands: Demands, args: argparse.Namespace) -> None:
    bodies = requests(24, args.tokens)
    expected = await ask_all(target.port, bodies, 24)
    waiting = asyncio.create_task(ask_all(target.port, bodies, 24))
    while (await metrics(target.port))["noria_num_requests_running"] < 20:
        await asyncio.sleep(0.05)
    target.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    async with Wire(target.port) as wire:
        await wire.send(post(PATH, bodies[0]))
        late = await wire.reply()
    retry = late.headers.get("retry-after")
    demands.add("stop: a new request", f"{late.status}, Retry-After {retry}", late.status == 503 and retry is not None)
    compare(demands, "stop: what ran", expected, await waiting)
    code = await asyncio.to_thread(target.process.wait, 60)
    demands.add("stop: exit code", str(code), code == 0)


Scenario = Callable[[Target, Demands, argparse.Namespace], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {"kills": kills, "poison": poison, "stall": stall, "stop": stop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without the server that was started
    demands = Demands()
    for name in args.only or SCENARIOS:
        port, log = free_port(), LOGS / f"deaths-{name}.log"
        command = noria_command(args.model, port, "--drain-timeout", "600")
        with running(command, f"http://127.0.0.1:{port}", log) as server:
            asyncio.run(_within(SCENARIOS[name](Target(port, psutil.Process(server.pid), log), demands, args)))
    demands.show()
    raise SystemExit(0 if demands.met else 1)


async def _within(scenario: Awaitable[None]) -> None:
    await scenario


if __name__ == "__main__":
    main()
