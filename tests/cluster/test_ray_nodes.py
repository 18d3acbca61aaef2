"""Ray with two nodes, of which one is killed in the middle of an epoch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distributed import Callback, RayTrainer, Trainer
from distributed.testing.conformance import distance, problem, small_model

X, Y = problem(40)
KILLED_IN = 8
"""The optimizer step, of 5 in each epoch, in which the node dies."""


class StandOn(Callback):
    """On one node: says where it is, and waits in a step for the node's end. Elsewhere: notes samples."""

    all_ranks = True

    def __init__(self, node: str, folder: Path) -> None:
        self.node, self.folder = node, folder

    def on_run_start(self, context: Any) -> None:
        import ray

        here, world = ray.get_runtime_context().get_node_id(), context.world
        # One write, whole: two ranks share the file.
        with (self.folder / "places").open("a", encoding="utf-8") as file:
            file.write(f"{here} {world.local_rank} {world.local_size} {world.num_nodes}\n")

    def on_step_end(self, context: Any) -> None:
        import ray

        if context.progress.step != KILLED_IN or ray.get_runtime_context().get_node_id() != self.node:
            return
        (self.folder / "here").touch()
        time.sleep(600)


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """(the cluster, its second node), each with as many CPUs as the parameter says; this process is
    connected to the first."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.05")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    args = {"num_cpus": request.param, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    try:
        second = cluster.add_node(num_cpus=request.param)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def killed_when(ready: Path, cluster: Any, node: Any) -> Iterator[None]:
    """The node dies as soon as the file is there."""
    over = threading.Event()

    def kill() -> None:
        while not ready.exists():
            if over.wait(0.05):
                return
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


def places_of(folder: Path) -> list[list[str]]:
    """[node, local rank, local size, number of nodes] of each rank that began, in that order."""
    return [line.split() for line in (folder / "places").read_text(encoding="utf-8").splitlines()]


# With room for all ranks on the node that is left they go on as many; with room for half of them, as half.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("nodes", "elastic", "last"),
    [
        (4, {"max_restarts": 5}, [["0", "2", "1"], ["1", "2", "1"]]),
        (1, {"max_restarts": 5, "min_ranks": 1}, [["0", "1", "1"]]),
    ],
    indirect=["nodes"],
    ids=["all", "half"],
)
def test_a_node_is_killed_and_the_run_completes(
    nodes: tuple[Any, Any], elastic: dict[str, Any], last: list[list[str]], tmp_path: Path
) -> None:
    cluster, second = nodes
    model, alone = small_model(), small_model()
    plain: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.3, "global_batch_size": 8, "epochs": 3}
    with killed_when(tmp_path / "here", cluster, second):
        history = RayTrainer(
            model,
            **plain,
            num_processes=2,
            num_nodes=2,
            callbacks=[StandOn(second.node_id, tmp_path)],
            checkpoint_dir=str(tmp_path / "saved"),
            checkpoint={"every_n_steps": 2, "asynchronous": False},
            elastic=elastic,
        ).fit((X, Y), (X, Y))
    places = places_of(tmp_path)
    # The two nodes have one address, by which Ray Train itself would take them for one node.
    assert len({node for node, *_ in places[:2]}) == 2
    assert [place[1:] for place in places[:2]] == [["0", "1", "2"]] * 2
    assert sorted(place[1:] for place in places[-len(last) :]) == last
    assert (tmp_path / "here").exists()
    assert len([node for node in cluster.list_all_nodes() if node is second]) == 0
    # More than one where Ray places ranks on the dead node again before it has missed its heartbeats.
    assert set(history.restarts) == {"Ray restarted all ranks"}
    assert (history.world_size, history.batch["global_batch_size"]) == (len(last), 8)
    # Every sample once an epoch and the same steps: the weights are those of one process that nobody touched.
    expected = Trainer(alone, backend="serial", **plain).fit((X, Y), (X, Y))
    assert distance(model, alone) < 1e-9
    # What came before is in the first attempt's.
    assert [epoch["epoch"] for epoch in history.epochs] == [1, 2]
    assert history.epochs[-1]["val_loss"] == pytest.approx(expected.epochs[-1]["val_loss"], abs=1e-9)
    assert history.epochs[-1]["step"] == 15
