"""ThreadGroup: a process group of torch whose ranks are threads of this process, on CPU and CUDA tensors.

NCCL refuses two ranks on one GPU. Here the last rank to call a collective computes it for all, with the
tensors of all of them at hand. As over a network, a call only begins a collective; waiting for the work ends
it. Ranks take turns (`distributed.communication.rank_turns`), so that waiting passes the turn on.

torch has a group of the same kind for its own tests
(``torch.testing._internal.distributed.multi_threaded_pg``), whose calls block, and without messages between
two ranks.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from distributed.communication.rank_turns import RankTurns
from distributed.communication.thread_arithmetic import ARITHMETIC, Call, Lists, copy

__all__ = ["NAME", "Exchange", "ThreadGroup", "join_threads", "worlds_of_threads"]

NAME = "threaded"
"""The backend, as torch knows it. By this name it tells device meshes of one thread from those of another."""
_LATEST = timedelta(days=1)
_here = threading.local()
"""``exchange`` and ``rank`` of a rank's thread."""


@dataclass
class _Meeting:
    """One collective: what its ranks have brought, and whether it is done."""

    name: str
    calls: dict[int, Call] = field(default_factory=dict)
    done: bool = False
    error: Exception | None = None


@dataclass
class _Message:
    """One end of a message between two ranks."""

    tensors: Sequence[Tensor]
    done: bool = False
    error: Exception | None = None


class Exchange:
    """Collectives and messages under way between the ranks of a run.

    Args:
        turns: the ranks.

    Attributes:
        counts: (name, type of device) -> number of calls of ranks.
    """

    def __init__(self, turns: RankTurns) -> None:
        self.turns, self.counts = turns, Counter[tuple[str, str]]()
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._messages: dict[tuple[str, int, int, int], tuple[deque[_Message], deque[_Message]]] = {}

    def meet(self, group: str, number: int, rank: int, size: int, name: str, call: Call) -> _Meeting:
        """Bring `call` to collective `number` of a group; the last of its `size` ranks computes it."""
        meeting = self._meetings.setdefault((group, number), _Meeting(name))
        if meeting.name != name:
            meeting.error = RuntimeError(
                f"ranks call different collectives: rank {rank} of group {group} calls {name}, another one"
                f" {meeting.name}"
            )
        meeting.calls[rank] = call
        if len(meeting.calls) == size or meeting.error is not None:
            self._meetings.pop((group, number))
            _finish(meeting, lambda: ARITHMETIC[name]([meeting.calls[r] for r in range(size)]))
        return meeting

    def post(self, group: str, source: int, target: int, tag: int, message: _Message, sends: bool) -> None:
        """Begin one end of a message; ends match in the order in which they begin."""
        both = self._messages.setdefault((group, source, target, tag), (deque(), deque()))
        both[0 if sends else 1].append(message)
        while both[0] and both[1]:
            sent, received = both[0].popleft(), both[1].popleft()
            _finish(received, lambda: _copy_all(received.tensors, sent.tensors))  # noqa: B023 - called at once
            sent.done, sent.error = received.done, received.error

    def source_of(self, group: str, target: int, tag: int) -> int | None:
        """A rank of the group that sends to `target`; None if there is none yet."""
        waiting = (key for key, (sent, _) in self._messages.items() if sent)
        return next((s for g, s, t, number in waiting if (g, t, number) == (group, target, tag)), None)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        copy(target, source)


@torch.no_grad()
def _finish(ended: _Meeting | _Message, compute: Callable[[], None]) -> None:
    """Compute, unless there is an error already, and let the device finish."""
    try:
        if ended.error is None:
            # Modes of the rank that comes last have nothing to do with the others' tensors.
            with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
                compute()
            settle()
    except Exception as error:  # noqa: BLE001 - raised on every rank that waits
        ended.error = error
    ended.done = True


def settle() -> None:
    """Wait for what this thread has given to its stream: other ranks have streams of their own."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


class ThreadWork(dist.Work):
    """A collective or message under way.

    Args:
        ended: what is waited for.
        result: what a future of it holds.
        group: whose rank waits.
        what: as of `RankTurns.wait`.
    """

    def __init__(
        self, ended: _Meeting | _Message, result: list[Tensor], group: ThreadGroup, what: str
    ) -> None:
        super().__init__()
        self._ended, self._result, self._group, self._what = ended, result, group, what
        self.source = -1

    def _source_rank(self) -> int:
        """The rank whose message was received from any of them."""
        return self.source

    def wait(self, timeout: timedelta = _LATEST) -> bool:
        """Wait for the other ranks.

        Raises:
            Exception: what the collective raised, on all of its ranks.
            LostRank: another rank has failed.
        """
        self._group.wait(lambda: self._ended.done, self._what)
        if self._ended.error is not None:
            raise self._ended.error
        return True

    def is_completed(self) -> bool:
        """Return True if it has ended by now: others continue when this rank waits."""
        return self._ended.done

    def is_success(self) -> bool:
        """Return True if it has ended without an error."""
        return self._ended.done and self._ended.error is None

    def result(self) -> list[Tensor]:
        """The tensors of this rank."""
        return self._result

    def get_future(self) -> Any:
        """A future that is done, once the work is: its callbacks run in the rank's own thread."""
        self.wait()
        devices = sorted({tensor.device.index for tensor in self._result if tensor.is_cuda})
        future: Any = torch.futures.Future(devices=[torch.device("cuda", index) for index in devices])
        future.set_result(self._result)
        return future


_Base: Any = dist.ProcessGroup  # names and arguments of its methods differ between releases of torch


class ThreadGroup(_Base):  # type: ignore[misc]
    """The ranks of a group, as one of them sees it.

    Args:
        exchange: of all ranks of the run.
        member: this rank, among all.
        name: the same on all ranks of the group.
        rank: this rank, in the group.
        size: number of ranks in the group.
    """

    def __init__(self, exchange: Exchange, member: int, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._exchange, self._member, self._key = exchange, member, name
        self._rank, self._size, self._number = rank, size, 0

    def getBackendName(self) -> str:
        """The name of the backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group."""
        return self._key

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """As `RankTurns.wait`."""
        self._exchange.turns.wait(self._member, ready, what)

    # -- collectives ------------------------------------------------------------------

    def _call(self, name: str, tensors: Lists, **given: Any) -> ThreadWork:
        """Begin a collective, with the tensors that its future holds."""
        settle()
        self._count(name, tensors)
        number, self._number = self._number, self._number + 1
        call = Call(**given)
        meeting = self._exchange.meet(self._key, number, self._rank, self._size, name, call)
        what = f"in {name} number {number} of group {self._key}"
        return ThreadWork(meeting, [tensor for part in tensors for tensor in part], self, what)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        """Reduce each tensor over the ranks, in place."""
        op = opts.reduceOp if hasattr(opts, "reduceOp") else opts or dist.ReduceOp.SUM
        return self._call("all_reduce", [tensors], outputs=[tensors], op=op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> ThreadWork:
        """Reduce each tensor over the ranks, into that of the root."""
        return self._call("reduce", [tensors], outputs=[tensors], op=opts.reduceOp, root=opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ThreadWork:
        """Write the root's tensors into those of the others."""
        return self._call("broadcast", [tensors], outputs=[tensors], root=opts.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ThreadWork:
        """Every rank's input, into a list of outputs on each."""
        return self._call("all_gather", outputs, outputs=outputs, inputs=[inputs])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        """Every rank's inputs; ``outputs[rank]`` are those of a rank."""
        by_input = [list(parts) for parts in zip(*outputs, strict=True)]
        return self.allgather(by_input, inputs)

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any = None) -> ThreadWork:
        """Every rank's tensor, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [value])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        """As `all_gather_single`, of several tensors."""
        parts = [self._parts(output) for output in outputs]
        return self._call("all_gather", [outputs], outputs=parts, inputs=[inputs])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ThreadWork:
        """Every rank's input, into the root's list of outputs."""
        return self._call("gather", outputs, outputs=outputs, inputs=[inputs], root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ThreadWork:
        """The root's list of inputs, one for each rank."""
        return self._call("scatter", [outputs], outputs=[outputs], inputs=inputs, root=opts.rootRank)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ThreadWork:
        """Reduce lists of inputs over the ranks, each of which gets its own entry."""
        return self._call("reduce_scatter", [outputs], outputs=[outputs], inputs=inputs, op=opts.reduceOp)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any) -> ThreadWork:
        """Reduce a tensor over the ranks, each of which gets its part of the first dimension."""
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> ThreadWork:
        """As `reduce_scatter_single`, of several tensors."""
        return self.reduce_scatter(outputs, [self._parts(value) for value in inputs], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ThreadWork:
        """An input for each rank, and an output of each."""
        return self._call("all_to_all", [outputs], outputs=[outputs], inputs=[inputs])

    def all_to_all_single(
        self,
        output: Tensor,
        value: Tensor,
        receives: list[int] | None = None,
        sends: list[int] | None = None,
        opts: Any = None,
    ) -> ThreadWork:
        """Rows of the first dimension for each rank, and of each; equal numbers of them without lists."""
        given = {"sends": list(sends or ()), "receives": list(receives or ())}
        return self._call("all_to_all_single", [[output]], outputs=[[output]], inputs=[[value]], **given)

    def barrier(self, opts: Any = None) -> ThreadWork:
        """Return when all ranks have called and the device has nothing left to do."""
        return self._call("barrier", [])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.detach().view(-1).chunk(self._size)) if tensor.numel() else [tensor] * self._size

    def _count(self, name: str, tensors: Lists) -> None:
        device = next((tensor.device.type for part in tensors for tensor in part), "none")
        self._exchange.counts[name, device] += 1

    # -- messages ---------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> ThreadWork:
        """Begin to send; done when the other rank has begun to receive."""
        return self._message(tensors, self._rank, target, tag, sends=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ThreadWork:
        """Begin to receive."""
        return self._message(tensors, source, self._rank, tag, sends=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ThreadWork:
        """Receive from the first rank that sends."""
        find = self._exchange.source_of
        self.wait(lambda: find(self._key, self._rank, tag) is not None, f"for a message of group {self._key}")
        source = find(self._key, self._rank, tag)
        assert source is not None
        work = self.recv(tensors, source, tag)
        work.source = source
        return work

    def _message(
        self, tensors: list[Tensor], source: int, target: int, tag: int, *, sends: bool
    ) -> ThreadWork:
        settle()
        self._count("send" if sends else "recv", [tensors])
        message = _Message(tensors)
        self._exchange.post(self._key, source, target, tag, message, sends)
        end = f"to send to rank {target}" if sends else f"for a message of rank {source}"
        return ThreadWork(message, tensors, self, f"{end} of group {self._key}, tag {tag}")

    # -- calls put together ------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing: calls between here and `_end_coalescing` begin one by one."""

    def _end_coalescing(self, device: torch.device) -> ThreadWork:
        """The work of a barrier, which ends after what has begun before it."""
        return self.barrier()


def _create(options: Any, backend_options: Any) -> ThreadGroup:
    """torch calls this for each new group, with its name and this rank's place in it."""
    return ThreadGroup(_here.exchange, _here.rank, options.group_id, options.group_rank, options.group_size)


class _World(threading.local):
    """The groups of one rank, as ``torch.distributed.distributed_c10d._World`` holds those of a process."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {})
        self.pg_coalesce_state: dict[Any, list[Any]] = {}


@contextmanager
def worlds_of_threads() -> Iterator[None]:
    """Within the block, each thread of this process has process groups of its own."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    with ExitStack() as stack:
        # torch's own tests have a backend of this name, too.
        stack.callback(dist.Backend._plugins.update, dict(dist.Backend._plugins))
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        stack.callback(setattr, c10d, "_world", c10d._world)
        c10d._world = _World()  # type: ignore[assignment]
        stack.callback(isolate, False)
        isolate(True)
        yield


@contextmanager
def join_threads(exchange: Exchange, rank: int) -> Iterator[None]:
    """Within the block, this thread is `rank` of a run, in a default process group with the others.

    Backward passes run in this thread: torch has one thread for each GPU otherwise, in which a rank would
    wait for another whose backward pass that thread has to run.
    """
    _here.exchange, _here.rank = exchange, rank
    with torch.autograd.set_multithreading_enabled(False):
        dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=exchange.turns.size)
        try:
            yield
        finally:
            dist.destroy_process_group()
