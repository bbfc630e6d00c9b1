"""The benchmark of planning runs as the engine does now."""

from __future__ import annotations

import pytest
from plan_cost import measure


@pytest.mark.parametrize(("depth", "tenants"), [(1, 0), (2, 0), (1, 3)])
def test_planning_is_measured_with_all_rows_running(depth: int, tenants: int) -> None:
    found = measure(running=4, waiting=6, steps=5, depth=depth, blocks=None, output=40, tenants=tenants)
    assert (found["running"], found["waiting"], found["depth"], found["preemptions"]) == (4, 6, depth, 0)
    assert 0.0 <= found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["mean_ms"] > 0.0


def test_requests_that_end_make_room_for_others() -> None:
    found = measure(running=4, waiting=6, steps=20, depth=1, blocks=None, output=5)
    assert found["waiting"] < 6
