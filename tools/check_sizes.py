"""Size limits of the code: functions at most 60 lines, classes 300, files 500 (C++ too). Exit 1 names what is over."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FUNCTION, CLASS, FILE = 60, 300, 500


def oversized(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > FILE:
        yield f"{path}: {lines} lines, a file may have {FILE}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > limit:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {limit}"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    files = [
        path
        for folder in ("src", "csrc", "tests", "benchmarks", "tools")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".py", ".cpp", ".h")
    ]
    problems = [problem for path in files for problem in oversized(path)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
