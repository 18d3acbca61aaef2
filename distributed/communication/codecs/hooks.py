"""Registers the codecs of the project; the classes are in `blocks`, `sparse` and `power_sgd`."""

from __future__ import annotations

from distributed.communication.codecs import sizes
from distributed.interfaces.codec import CodecSpec
from distributed.registry.hookspecs import hookimpl

__all__ = ["register_codecs"]

_HERE = "distributed.communication.codecs"
_ROWS = frozenset({"scatter"})
_SUMS = frozenset({"sum"})


_CODECS = [
    CodecSpec(
        name="fp16",
        target=f"{_HERE}.blocks:Float16Codec",
        summary="half precision: half the bytes of float32",
        traffic=sizes.cast_traffic,
        exchanges=_ROWS,
        error_feedback=False,
        scales=True,
    ),
    CodecSpec(
        name="bf16",
        target=f"{_HERE}.blocks:BFloat16Codec",
        summary="bfloat16: half the bytes of float32",
        traffic=sizes.cast_traffic,
        exchanges=_ROWS,
        error_feedback=False,
        scales=True,
    ),
    CodecSpec(
        name="int8",
        target=f"{_HERE}.blocks:Int8Codec",
        summary="8-bit integers with a scale for each block: a quarter of the bytes of float32",
        traffic=sizes.eight_bit_traffic,
        exchanges=_ROWS,
    ),
    CodecSpec(
        name="fp8",
        target=f"{_HERE}.blocks:Float8Codec",
        summary="float8 e4m3 with a scale for each block: a quarter of the bytes of float32",
        traffic=sizes.eight_bit_traffic,
        exchanges=_ROWS,
    ),
    CodecSpec(
        name="top-k",
        target=f"{_HERE}.sparse:TopKCodec",
        summary="the elements of largest magnitude, with their indices",
        traffic=sizes.top_k_traffic,
        exchanges=frozenset({"gather"}),
        options=frozenset({"ratio"}),
    ),
    CodecSpec(
        name="random-k",
        target=f"{_HERE}.sparse:RandomKCodec",
        summary="random elements, the same on all ranks, without indices",
        traffic=sizes.random_k_traffic,
        exchanges=_SUMS,
        options=frozenset({"ratio"}),
    ),
    CodecSpec(
        name="powersgd",
        target=f"{_HERE}.power_sgd:PowerSGDCodec",
        summary="two thin factors instead of each matrix",
        traffic=sizes.power_sgd_traffic,
        exchanges=_SUMS,
        options=frozenset({"rank"}),
    ),
]


@hookimpl
def register_codecs() -> list[CodecSpec]:
    """The codecs that round each element, those that send a few elements, and PowerSGD."""
    return list(_CODECS)
