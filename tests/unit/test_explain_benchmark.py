"""What `benchmarks/explain.py` makes of a measurement and an account."""

from __future__ import annotations

import pytest
from explain import compare, report

from noria.bench.http import Record

PARTS = {"before_ms": 1.0, "waiting_ms": 49.0, "ran_ms": 45.0, "own_ms": 9.0, "delivery_ms": 4.0, "lost_ms": 0.0}


def told(*lengths: float, gap: float = 0.0) -> dict:
    phases, at = [], 0.0
    for length in lengths:
        phases.append({"at_ms": at, "ms": length})
        at += length + gap
    return {"choices": [{"phases": phases, "known": True, "sums": PARTS | {"waited": {"cap": 49.0}}}]}


def test_what_is_missing_is_told_in_shares_and_milliseconds() -> None:
    record = Record(start=4.95, end=5.1, id="cmpl-1", sent=5.0)
    rows = [compare(record, told(50.0, 49.5)), compare(record, told(50.0, 40.0, gap=0.5))]
    assert [row["missing"] for row in rows] == [pytest.approx(0.005), pytest.approx(0.1)]
    found = report(rows)
    assert (found["requests"], found["within"], found["known"]) == (2, 1, 2)
    assert found["within_connecting"] == 0
    assert found["largest_gap_ms"] == pytest.approx(0.5)
    assert found["missing_ms"]["p100"] == pytest.approx(10.0)
    assert found["waited_ms"] == {"cap": 49.0}
