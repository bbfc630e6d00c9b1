"""The code that docs/guides/clients.md shows."""

from __future__ import annotations

import re

from served import KEY, ROOT, Served

PAGE = (ROOT / "docs" / "guides" / "clients.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def code_of(section: str, server: Served) -> str:
    """The indented lines of a section, with the address and key of a server."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", SECTIONS[section], re.MULTILINE)
    lines = [line.removeprefix("    ") for block in blocks if "    " in block for line in block.splitlines()]
    return "\n".join(lines).replace("http://localhost:8000", server.url).replace("secret", KEY)
