"""Section `ray` of the configuration."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from distributed.config import Section


class RaySection(Section):
    """Cluster, resources and inner backend of ``ray``. Other backends reject them."""

    inner: str = Field("pytorch-ddp", description="Torch backend that the ranks run.")
    address: str | None = Field(
        None,
        description="Address of the cluster: auto, HOST:PORT or ray://HOST:PORT. None: the cluster to which"
        " this process is connected, else RAY_ADDRESS, else a new cluster on this host for this run.",
        json_schema_extra={"flag": "--address"},
    )
    num_cpus_per_rank: NonNegativeFloat = Field(
        1.0, description="Number of CPUs that Ray reserves for each rank."
    )
    resources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="Other Ray resources that each rank requires, by name."
    )
    start_timeout: PositiveFloat = Field(
        300.0, description="Seconds to wait until a busy cluster has free resources for the ranks."
    )
    storage_path: str | None = Field(
        None,
        description="Folder for Ray Train's own record of the run; None disables it.",
        json_schema_extra={"path": True},
    )
