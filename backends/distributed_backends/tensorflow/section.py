"""Section `tensorflow` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distributed.config import Section

__all__ = ["TensorFlowSection"]


class TensorFlowSection(Section):
    """What only TensorFlow has. Another backend refuses it."""

    strategy: Literal["auto", "mirrored", "multi_worker"] = Field(
        "auto",
        description="mirrored: one process drives all devices of this host; multi_worker: a process for"
        " each; auto: mirrored for num_gpus on one host, multi_worker for num_processes and several hosts.",
    )
