"""Serialize the graph of a tf.data pipeline, and seed its shuffles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from distributed.data.order import mix

_SHUFFLES = ("ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2")
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_RANDOM = (
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomDataset",
    "RandomDatasetV2",
    "SampleDistortedBoundingBoxV2",
)


def graph_of(dataset: Any) -> bytes | None:
    """The pipeline as bytes; None when it calls Python and so cannot leave its process."""
    try:
        graph = dataset._as_serialized_graph(
            strip_device_assignment=True,
            external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE,
        ).numpy()
    except (tf.errors.OpError, ValueError):
        return None
    calls = any(node.op in _PYTHON for node in _nodes(tf.compat.v1.GraphDef.FromString(graph)))
    return None if calls else bytes(graph)


def restored(graph: bytes, spec: Any) -> Any:
    """The pipeline of `graph`, whose elements have `spec`."""
    from tensorflow.python.data.ops.dataset_ops import _VariantDataset

    return _VariantDataset(tf.raw_ops.DatasetFromGraph(graph_def=graph), spec)


def reseeded(graph: bytes, run_seed: int, epoch: int) -> bytes:
    """`graph` with every shuffle's order fixed for this epoch.

    A shuffle that has a seed takes that and the epoch (its own order again and again when it does
    not reshuffle each iteration); one that has none takes `run_seed`, which holds the epoch already.
    """
    definition = tf.compat.v1.GraphDef.FromString(graph)
    for number, (nodes, node, inner) in enumerate(list(_shuffles(definition))):
        known = {other.name: other for other in nodes}
        sources = [node.input[place].split(":")[0].lstrip("^") for place in (2, 3)]
        seeds = [_constant(known.get(source)) for source in sources]
        if any(seeds) and not node.attr["reshuffle_each_iteration"].b:
            continue
        base = mix(*seeds, epoch) if any(seeds) else mix(run_seed, number)
        for place in (2, 3):
            constant = nodes.add()
            constant.name = f"{node.name}/distributed_seed_{place}"
            constant.op = "Const"
            constant.attr["dtype"].type = tf.int64.as_datatype_enum
            value = mix(base, place) % 2**62 + 1
            constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
            node.input[place] = f"{constant.name}:output:0" if inner else constant.name
        node.attr["reshuffle_each_iteration"].b = False
    return bytes(definition.SerializeToString())


def random_ops(graph: bytes) -> list[str]:
    """Names of operations in the pipeline that draw without a seed."""
    nodes = _nodes(tf.compat.v1.GraphDef.FromString(graph))
    return sorted({n.op for n in nodes if n.op in _RANDOM and not n.attr["seed"].i and not n.attr["seed2"].i})


def unseeded_shuffles(dataset: Any) -> bool:
    """Whether a shuffle without a seed is among the pipeline's transformations."""
    if hasattr(dataset, "_seed") and hasattr(dataset, "_seed2"):
        try:
            if not int(dataset._seed) and not int(dataset._seed2):
                return True
        except TypeError:
            pass  # no number yet: it stands inside a function
    return any(unseeded_shuffles(part) for part in dataset._inputs())


def _nodes(definition: Any) -> Iterator[Any]:
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _shuffles(definition: Any) -> Iterator[tuple[Any, Any, bool]]:
    """(nodes beside it, the shuffle, whether it is inside a function)."""
    for node in list(definition.node):
        if node.op in _SHUFFLES:
            yield definition.node, node, False
    for function in definition.library.function:
        for node in list(function.node_def):
            if node.op in _SHUFFLES:
                yield function.node_def, node, True


def _constant(node: Any) -> int:
    if node is None or node.op != "Const":
        return 0
    return int(tf.make_ndarray(node.attr["value"].tensor))
