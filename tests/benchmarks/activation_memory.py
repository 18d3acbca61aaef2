"""Bytes of activations that a training step stores, under each way of recomputing them.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.activation_memory [--width 128] [--layers 6]

Counts the allocations of the CPU that torch's profiler records in a forward and backward pass of a random
Llama of transformers: the bytes that are live between forward and backward, and the peak. Parameters and
batch are not among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from distributed.training.activation_checkpointing import recompute
from distributed.training.blocks import find_blocks

MODES = ("none", "full", "selective", "offload")
_BETWEEN = "between forward and backward"


def step_bytes(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[int, int]:
    """(bytes that are live after forward, peak bytes) of one forward and backward pass on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = loss_of()
        with record_function(_BETWEEN):
            pass
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    live = peak = between = 0
    kineto = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in sorted(kineto.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == _BETWEEN:
            between = live
    return between, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=args.width,
            intermediate_size=4 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            use_cache=False,
        )
    )
    words = torch.randint(0, 512, (args.batch, args.length))
    for mode in MODES:
        undo = None if mode == "none" else recompute(model, find_blocks(model, ()), mode)

        def loss_of() -> Tensor:
            loss: Tensor = model(words, labels=words).loss
            return loss

        step_bytes(model, loss_of)
        after, peak = step_bytes(model, loss_of)
        start = perf_counter()
        for _ in range(5):
            loss_of().backward()  # type: ignore[no-untyped-call]
        seconds = (perf_counter() - start) / 5
        print(
            f"{mode:>10}: {after / 2**20:7.1f} MiB after forward, peak {peak / 2**20:7.1f}, {seconds:.3f} s"
        )
        if undo is not None:
            undo.undo()


if __name__ == "__main__":
    main()
