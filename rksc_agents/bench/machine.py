"""What a comparison ran on."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch

from rksc_agents.bench.peers.weights import Weights


def machine(weights: Weights) -> dict[str, Any]:
    """The model and the machine as JSON values."""
    return {
        "model": weights.name,
        **weights.described(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def told(found: dict[str, Any]) -> str:
    """The machine as a line."""
    copies = ", two copies of the weights" if found["copies"] == 2 else ""
    return f"{found['model']}, {found['dtype']}, {found['device']}, {found['threads']} threads{copies}"
