"""Section `tensorflow` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distributed.config import Section


class TensorFlowSection(Section):
    """Options of backend ``tensorflow``. Other backends reject them."""

    strategy: Literal["auto", "mirrored", "multi_worker"] = Field(
        "auto",
        description="mirrored: one process for all devices of this host; multi_worker: one process per"
        " device; auto: mirrored for num_gpus on one host, multi_worker for num_processes and for several"
        " hosts.",
    )
