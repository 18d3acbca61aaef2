"""Checks that fields of a configuration agree with each other."""

from __future__ import annotations

from typing import Any

__all__ = ["check_elastic", "check_optimizer_bits", "check_ranks"]


def check_ranks(config: Any) -> None:
    """Raise ValueError unless num_gpus, num_processes, num_nodes and gpus_per_node agree."""
    total = config.num_ranks
    if config.num_gpus is not None and config.num_processes not in (None, config.num_gpus):
        raise ValueError(
            f"num_gpus={config.num_gpus} and num_processes={config.num_processes} disagree:"
            " both count the ranks over all nodes; give one of them"
        )
    if config.gpus_per_node is not None and total != config.gpus_per_node * config.num_nodes:
        raise ValueError(
            f"num_gpus={total} is not num_nodes={config.num_nodes} x gpus_per_node={config.gpus_per_node}"
            f" = {config.num_nodes * config.gpus_per_node}: num_gpus counts the ranks over all nodes;"
            f" set num_gpus={config.num_nodes * config.gpus_per_node} or leave it out"
        )
    if total is not None and total % config.num_nodes:
        raise ValueError(
            f"num_gpus={total} cannot be spread evenly over num_nodes={config.num_nodes}:"
            f" use {total - total % config.num_nodes or config.num_nodes} or"
            f" {total + config.num_nodes - total % config.num_nodes}"
        )
    if config.node_rank is not None and config.node_rank >= config.num_nodes:
        raise ValueError(
            f"node_rank={config.node_rank} is not below num_nodes={config.num_nodes}: nodes count from 0"
        )


def check_elastic(config: Any) -> None:
    """Raise ValueError if a field that `elastic` needs is missing."""
    section, ranks = config.elastic, config.num_ranks
    if section.max_ranks is not None and ranks != section.max_ranks:
        raise ValueError(
            f"elastic.max_ranks={section.max_ranks} and num_gpus={ranks} disagree: a run starts with all the"
            " ranks it may have; give one of them"
        )
    if section.min_ranks is not None and ranks is not None and section.min_ranks > ranks:
        raise ValueError(f"elastic.min_ranks={section.min_ranks} is above the {ranks} ranks of the run")
    if section.min_nodes is not None and section.min_nodes > config.num_nodes:
        raise ValueError(f"elastic.min_nodes={section.min_nodes} is above num_nodes={config.num_nodes}")
    if config.is_elastic and config.checkpoint_dir is None:
        raise ValueError("elastic needs checkpoint_dir: without checkpoints there is nothing to resume from")


def check_optimizer_bits(config: Any) -> None:
    """Raise ValueError if `optimizer_bits` is set for an optimizer without moments."""
    if config.optimizer_bits != 32 and config.optimizer == "sgd":
        raise ValueError(
            f"optimizer_bits={config.optimizer_bits} is for adamw and adam, and optimizer=sgd: set one of"
            " these, or leave optimizer_bits out"
        )
