"""Everything that RESULTS.md shows, in one unattended run of so many minutes; then writes it.

python benchmarks/measure_all.py --minutes 42 --root build/peers

One stage after the other, each a process of its own with a time limit; one that fails or takes too long costs only its
own part. What this commit has measured already is not measured again, so a run that was ended can be started anew.
The engines' turns take what time the other stages leave. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from noria.bench.report import machine

HERE = Path(__file__).parent
NORIA = (sys.executable, "-m", "noria.cli.main")
STOP_SECONDS = 150.0  # a stage gets this long to stop the servers that it started
SCHEMES = ("int8", "auto", "none")  # of the roofline


@dataclass(frozen=True, slots=True)
class Stage:
    """A command and the file that it leaves. `seconds`: about what it takes; it is ended after `most`."""

    name: str
    command: tuple[str, ...]
    result: Path
    seconds: float
    most: float


def stages_before(results: Path, root: Path, model: str, text: Path | None) -> list[Stage]:
    """What is short and must not be lost. `text`: where Noria's perplexity is measured again, None: nowhere."""
    found = []
    for scheme in SCHEMES:
        path = results / f"roofline-{scheme}.json"
        command = (*NORIA, "bench", "roofline", "--model", model, "--quantization", scheme, "--pin")
        command += ("--batch", "1,100", "--context", "192", "--chunk", "1024", "--seconds", "2", "--json", str(path))
        found.append(Stage(f"roofline, {scheme}", command, path, 20, 120))
    path = results / "plan.json"
    found.append(Stage("planning", _script("plan_cost.py", "--json", str(path)), path, 10, 120))
    path = results / "idle.json"
    found.append(Stage("idle server", _script("idle.py", "--model", model, "--json", str(path)), path, 30, 120))
    shapes = ("--models", str(root / "shapes"), "--llama-bin", str(root / "llama.cpp" / "build" / "bin"))
    path = results / "shapes.json"
    found.append(Stage("other shapes", _script("shapes.py", *shapes, "--output", str(path)), path, 180, 500))
    if text is not None:
        path = results / "peers-perplexity.json"
        asked = ("--model", model, "--text", str(text), "--root", str(root), "--output", str(path))
        command = (sys.executable, "-m", "peers.perplexity", *asked, "--engines", "noria", "--again", "Noria")
        found.append(Stage("perplexity", command, path, 20, 300))
    return found


def peers(results: Path, root: Path, model: str, store: Path, seconds: float, limit: float) -> Stage:
    command = (sys.executable, "-m", "peers", "--model", model, "--root", str(root), "--store", str(store))
    command += ("--minutes", f"{seconds / 60:.2f}", "--limit", f"{limit:g}", "--output", str(results / "peers"))
    command += ("--perplexity", str(results / "peers-perplexity.json"))
    # It begins nothing that it does not expect to end in time; a minute more for what it expected wrongly.
    return Stage("engines in turns", command, results / "peers.json", seconds, seconds + limit + 60)


def growth(results: Path, model: str) -> Stage:
    output = results / "growth"
    command = _script("growth.py", "--model", model, "--quantization", "int8", "--output", str(output))
    return Stage("growth of a step", command, output.with_suffix(".json"), 90, 300)


def _script(name: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *flags)


def run(stage: Stage, log: Path, env: dict[str, str]) -> bool:
    """Runs a stage and everything that it starts to an end; whether it succeeded."""
    began = time.monotonic()
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n$ {' '.join(stage.command)}\n")
        output.flush()
        process = subprocess.Popen(
            stage.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )
        try:
            code: int | None = process.wait(stage.most)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    state = "done" if code == 0 else "ended for taking too long" if code is None else f"failed ({code})"
    print(f"{time.strftime('%H:%M:%S')} {stage.name}: {state}, {time.monotonic() - began:,.0f} s", flush=True)
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to stop what it started, then leaves nothing of its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measured(path: Path, commit: str | None) -> bool:
    """Whether this commit left it."""
    try:
        return bool(commit) and json.loads(path.read_text(encoding="utf-8"))["machine"]["commit"] == commit
    except (OSError, ValueError, KeyError):
        return False


def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_all(stages: Sequence[Stage], commit: str | None, log: Path, env: dict[str, str]) -> None:
    for stage in stages:
        if measured(stage.result, commit):
            print(f"{stage.name}: there already", flush=True)
            continue
        run(stage, log, env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=42.0, help="for everything")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--root", type=Path, default=Path("build/peers"), help="the engines' environments and models")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--text", type=Path, help="the text of peers-perplexity.json: measures Noria's again")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds that one measurement of an engine may take")
    parser.add_argument("--report-only", action="store_true", help="measure nothing, write RESULTS.md")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    env, commit = environment(), machine()["commit"]
    report = _script("report.py", "--results", str(args.results), "--output", str(args.results.parent / "RESULTS.md"))
    end = time.monotonic() + 60.0 * args.minutes
    args.results.mkdir(parents=True, exist_ok=True)
    log = args.root / "logs" / f"all-{commit}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not args.report_only:
            last = growth(args.results, args.model)
            run_all(stages_before(args.results, args.root, args.model, args.text), commit, log, env)
            left = end - time.monotonic() - (0.0 if measured(last.result, commit) else last.seconds)
            store = args.root / f"runs-{commit}"
            run(peers(args.results, args.root, args.model, store, max(left, 60.0), args.limit), log, env)
            run_all([last], commit, log, env)
    finally:
        subprocess.run(report, env=env, check=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
