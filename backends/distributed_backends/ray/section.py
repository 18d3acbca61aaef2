"""Section `ray` of the configuration."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from distributed.config import Section

__all__ = ["RaySection"]


class RaySection(Section):
    """Where backend ``ray`` starts ranks, and what they run. Another backend refuses it."""

    inner: str = Field("pytorch-ddp", description="The torch backend that the ranks run.")
    address: str | None = Field(
        None,
        description="The cluster: auto, HOST:PORT or ray://HOST:PORT. None: the one that this process is"
        " connected to, RAY_ADDRESS's, or a cluster on this host for the run alone.",
        json_schema_extra={"flag": "--address"},
    )
    num_cpus_per_rank: NonNegativeFloat = Field(1.0, description="CPUs that Ray sets aside for each rank.")
    resources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="Other resources each rank needs, by Ray's names for them."
    )
    start_timeout: PositiveFloat = Field(
        300.0, description="Seconds to wait for a busy cluster to have room for the ranks."
    )
    storage_path: str | None = Field(
        None, description="Where Ray Train keeps its own record of the run; None keeps none."
    )
