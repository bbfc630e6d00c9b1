"""What docs/guides/clients.md shows can be typed: each section's code runs, from top to bottom, against a server. The
command for lm-eval is tried in test_lm_eval."""

from __future__ import annotations

import pytest
from guide import SECTIONS, code_of
from served import Served


def test_every_section_is_tried() -> None:
    assert sorted(SECTIONS) == ["LangChain", "LiteLLM", "lm-eval", "openai"]


@pytest.mark.parametrize("section", ["openai", "LangChain", "LiteLLM"])
def test_python(server: Served, section: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = code_of(section, server)
    assert server.url in code
    assert len(code.splitlines()) > 5
    exec(compile(code, f"clients.md: {section}", "exec"), {"__name__": "guide"})
    said = capfd.readouterr().out
    assert said.strip()
    if section == "openai":
        assert "kind=" in said
        assert "city=" in said
    if section == "LangChain":
        assert "spokes=" in said
        assert "'name': 'turn'" in said
