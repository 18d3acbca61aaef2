"""Contracts of a gradient codec: one sum on all ranks, nothing lost, stated bytes, exact resumes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distributed.testing.codec_suite import CodecRank, CodecSuite
from distributed.testing.thread_wire import ThreadWire, run_ranks

__all__ = ["CodecContracts"]

_EXACT = 1e-12
"""Relative error of a sum of a few float64 numbers."""
_ORACLE = 1e-9
_STEPS = 4


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def _close(found: Tensor, expected: Tensor, limit: float, what: str) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=limit, atol=limit, msg=lambda text: f"{what}: {text}"
    )


def _equal(found: Tensor, expected: Tensor) -> bool:
    """The same bits, those of NaN included."""
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return torch.equal(*as_bytes)


class CodecContracts(CodecSuite):
    """What a run with the codec relies on; see `CodecSuite` for what a subclass may set."""

    # -- the sum -----------------------------------------------------------------------

    def test_all_ranks_have_the_bits_of_one_total(self) -> None:
        """In each of several steps; ranks that differ would drift apart."""
        for size in self.sizes:
            ranks = run_ranks(size, lambda wire: self.train(self.rank(wire), range(_STEPS)))
            for name in self.shapes:
                for step in range(_STEPS):
                    same = all(_equal(rank[step][name], ranks[0][step][name]) for rank in ranks)
                    assert same, f"{size} ranks, step {step}: the totals of '{name}' differ between ranks"

    def test_contributions_add_up_to_the_total(self) -> None:
        """`Result.contribution` is this rank's part of `Result.total`, and the gradient becomes the total."""

        def work(wire: ThreadWire) -> tuple[CodecRank, dict[str, Tensor]]:
            rank = self.rank(wire)
            return rank, self.train(rank, range(2))[-1]

        for size in self.sizes:
            ranks = run_ranks(size, work)
            for name in self.shapes:
                results = [rank.results[name] for rank, _ in ranks]
                _close(_total([r.contribution for r in results]), results[0].total, _EXACT, name)
                assert _equal(ranks[0][1][name], results[0].total)

    def test_nothing_is_lost_with_error_feedback(self) -> None:
        """The totals of all steps and what the ranks still keep are all gradients. It holds also for a codec
        that rounds: what it has rounded off is kept."""

        def work(wire: ThreadWire) -> tuple[list[dict[str, Tensor]], CodecRank]:
            rank = self.rank(wire)
            return self.train(rank, range(_STEPS)), rank

        for size in self.sizes:
            ranks = run_ranks(size, work)
            totals = ranks[0][0]
            for name in self.shapes:
                given = _total([self.gradients(r, step)[name] for r in range(size) for step in range(_STEPS)])
                kept = _total([rank.residuals[name] for _, rank in ranks])
                sent = _total([total[name] for total in totals])
                _close(sent + kept, given, _EXACT, f"{size} ranks, '{name}'")

    def test_rounding_stays_within_the_bound(self) -> None:
        """Without error feedback, where `bound` is set."""
        if self.bound is None:
            pytest.skip("sets no bound: it leaves out parts of a gradient")
        for size in self.sizes:
            ranks = run_ranks(size, lambda wire: self.train(self.rank(wire, feeds_back=False), [0]))
            for name in self.shapes:
                given = [self.gradients(rank, 0)[name] for rank in range(size)]
                limit = self.bound * sum(float(g.abs().max()) for g in given)
                error = float((ranks[0][0][name] - _total(given)).abs().max())
                assert error <= limit, f"{size} ranks, '{name}': {error:.3g}, and the bound is {limit:.3g}"

    def test_each_total_is_the_oracles(self) -> None:
        """Where the subclass has an oracle: with error feedback, step by step."""
        if self.oracle() is None:
            pytest.skip("has no oracle")
        for size in self.sizes:
            ranks = run_ranks(size, lambda wire: self.train(self.rank(wire), range(_STEPS)))
            reduce = self.oracle()
            assert reduce is not None
            pending: dict[tuple[str, int], Tensor] = {}
            for step in range(_STEPS):
                gradients = [self.gradients(rank, step) for rank in range(size)]
                for name in self.shapes:
                    values = [g[name] + pending.get((name, rank), 0) for rank, g in enumerate(gradients)]
                    total, sent = reduce([value.clone() for value in values], name, step)
                    pending |= {(name, rank): values[rank] - sent[rank] for rank in range(size)}
                    _close(ranks[0][step][name], total, _ORACLE, f"{size} ranks, step {step}, '{name}'")

    def test_buckets_do_not_matter(self) -> None:
        """One exchange for all parameters, two, or one for each give the same bits."""
        size = self.sizes[-1]

        def work(wire: ThreadWire, buckets: int | None) -> list[dict[str, Tensor]]:
            rank = self.rank(wire)
            return [rank.step(self.gradients(wire.rank, step), buckets) for step in range(3)]

        one, two, many = (
            run_ranks(size, lambda wire, b=buckets: work(wire, b))[0]  # type: ignore[misc]
            for buckets in (1, 2, None)
        )
        for step, totals in enumerate(one):
            for name, total in totals.items():
                same = _equal(total, two[step][name]) and _equal(total, many[step][name])
                assert same, f"step {step}, '{name}'"

    # -- the bytes ---------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_bytes_are_those_stated(self, dtype: torch.dtype) -> None:
        """The mean over the ranks of what each sends of a parameter is `wire_bytes`, to the byte. Together
        with the padding of rows that the ranks share out, of which each parameter has one more on some rank,
        it is what leaves a rank."""

        def work(wire: ThreadWire) -> CodecRank:
            rank = self.rank(wire, feeds_back=None)
            rank.step(self.gradients(wire.rank, 0, dtype))
            return rank

        section, itemsize = self.config(None).compression, max(4, dtype.itemsize)
        for size in self.sizes:
            ranks, stated = run_ranks(size, work), 0.0
            for name, shape in self.shapes.items():
                expected = self.spec.wire_bytes(shape, itemsize, section, size)
                sent = sum(nbytes for rank in ranks for _, nbytes in rank.requests[name]) / size
                assert sent == pytest.approx(expected, rel=1e-9), f"{size} ranks, '{name}'"
                stated += expected
            padding = 2 * (size - 1) * len(self.shapes) * ranks[0].widest
            for rank in ranks:
                assert stated * (1 - 1e-9) <= rank.wire.sent <= stated * (1 + 1e-9) + padding

    def test_exchanges_are_those_declared(self) -> None:
        """Backends that have the collectives of `exchanges` can run the codec; traffic states them for each
        shape."""

        def work(wire: ThreadWire) -> CodecRank:
            rank = self.rank(wire, feeds_back=None)
            self.train(rank, [0])
            return rank

        used: set[str] = set()
        requests, section = run_ranks(2, work)[0].requests, self.config(None).compression
        for name, shape in self.shapes.items():
            kinds = {kind for kind, _ in requests[name]}
            assert kinds == self.spec.traffic(shape, 8, section).kinds, f"'{name}'"
            used |= kinds
        assert used == self.spec.exchanges

    # -- what is not finite, and skipped steps ------------------------------------------

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_a_value_that_is_not_finite_reaches_all_ranks(self, value: float) -> None:
        """In the step in which a single rank has it: first, last or any other element of a parameter."""

        def work(wire: ThreadWire, place: int) -> dict[str, Tensor]:
            rank = self.rank(wire, revocable=True)
            self.train(rank, [0])
            own = self.gradients(wire.rank, 1)
            if wire.rank == wire.size - 1:
                for gradient in own.values():
                    gradient.view(-1)[place % gradient.numel()] = value
            return rank.step(own, skipped=True)

        size = self.sizes[0]
        for place in (0, -1, 613):
            for totals in run_ranks(size, lambda wire, p=place: work(wire, p)):  # type: ignore[misc]
                for name, total in totals.items():
                    assert not torch.isfinite(total).all(), f"a rank does not see {value} in '{name}'"

    def test_a_skipped_step_leaves_no_trace(self) -> None:
        """The step after a skipped one is the same, whatever the gradients of the skipped one were."""

        def work(wire: ThreadWire, factor: float) -> tuple[list[dict[str, Tensor]], bool]:
            rank = self.rank(wire, revocable=True)
            totals = self.train(rank, [0])
            kept = {name: tensor.clone() for name, tensor in rank.residuals.items()}
            states = {n: {k: t.clone() for k, t in own.items()} for n, own in rank.states.items()}
            bad = {name: gradient * factor for name, gradient in self.gradients(wire.rank, 1).items()}
            rank.step(bad, skipped=True)
            same = all(_equal(rank.residuals[name], tensor) for name, tensor in kept.items()) and all(
                _equal(rank.states[n][k], t) for n, own in states.items() for k, t in own.items()
            )
            return [*totals, *self.train(rank, [2, 3])], same

        one, other = (
            run_ranks(2, lambda wire, f=factor: work(wire, f))  # type: ignore[misc]
            for factor in (1.0, float("inf"))
        )
        for (totals, same), (others, others_same) in zip(one, other, strict=True):
            assert same, "a skipped step has changed residuals or states"
            assert others_same, "a skipped step has changed residuals or states"
            for step, found in enumerate(totals):
                assert all(_equal(found[name], others[step][name]) for name in self.shapes)

    # -- checkpoints -------------------------------------------------------------------

    def test_a_resumed_run_has_the_same_bits(self) -> None:
        """On as many ranks: residuals, states and steps are those saved, also where the first step has left
        out parameters."""
        for size in self.sizes:
            whole = run_ranks(size, lambda wire: self.train_parts(self.rank(wire), range(_STEPS)))
            saved = self._save(size, 1)

            def resumed(wire: ThreadWire, saved: tuple[CodecRank, ...] = saved) -> list[dict[str, Tensor]]:
                rank = self.rank(wire)
                rank.resume([chunk for one in saved for chunk in one.save()])
                return self.train_parts(rank, range(1, _STEPS))

            for rank, found in enumerate(run_ranks(size, resumed)):
                for step, totals in enumerate(found, start=1):
                    same = all(_equal(total, whole[rank][step][name]) for name, total in totals.items())
                    assert same, f"{size} ranks: step {step} differs after a resume"

    def test_another_number_of_ranks_keeps_what_is_pending(self) -> None:
        """More or fewer ranks: what the ranks have still to send adds up to what it was, and is sent."""
        for first, second in ((self.sizes[-1], self.sizes[0]), (self.sizes[0], self.sizes[-1])):
            saved = self._save(first, 2)

            def resumed(
                wire: ThreadWire, saved: tuple[CodecRank, ...] = saved
            ) -> tuple[CodecRank, dict[str, Tensor], dict[str, Tensor]]:
                rank = self.rank(wire)
                rank.resume([chunk for one in saved for chunk in one.save()])
                loaded = {name: tensor.clone() for name, tensor in rank.residuals.items()}
                return rank, loaded, self.train(rank, [2])[0]

            ranks = run_ranks(second, resumed)
            for name in self.shapes:
                pending = _total([rank.residuals[name] for rank in saved])
                what = f"{first} to {second} ranks, '{name}'"
                _close(_total([loaded[name] for _, loaded, _ in ranks]), pending, _EXACT, what)
                given = _total([self.gradients(rank, 2)[name] for rank in range(second)])
                kept = _total([rank.residuals[name] for rank, _, _ in ranks])
                _close(ranks[0][2][name] + kept, given + pending, _EXACT, what)

    def _save(self, size: int, steps: int) -> tuple[CodecRank, ...]:
        """The ranks of a run that has taken `steps`."""

        def work(wire: ThreadWire) -> CodecRank:
            rank = self.rank(wire)
            self.train_parts(rank, range(steps))
            return rank

        return tuple(run_ranks(size, work))

    # -- tensors of any kind -----------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_tensors_of_any_kind(self, dtype: torch.dtype) -> None:
        """Empty, of one element, 0-dimensional, large, and a view that is not contiguous, which gives the
        bits of its copy. The gradients keep dtype, shape and strides; what is lost is rounded by the dtype in
        which the codec computes."""
        shapes = {"empty": (0, 3), "one": (1,), "none": (), "large": (300, 700), "view": (40, 24), "copy": ()}
        size, limit = 2, 1e-12 if dtype == torch.float64 else 1e-5

        def given(rank: int) -> dict[str, Tensor]:
            draw = torch.Generator().manual_seed(rank)
            made = {
                n: torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for n, s in shapes.items()
            }
            made["view"] = made["view"].t()
            return made

        def work(wire: ThreadWire, contiguous: bool) -> tuple[dict[str, Tensor], CodecRank]:
            compression = self.compression(self.spec, self.config())
            rank, own = CodecRank(compression, wire, shapes), given(wire.rank)
            if contiguous:
                own["view"] = own["view"].contiguous()
            return rank.step(own), rank

        ranks, copies = (
            run_ranks(size, lambda wire, c=contiguous: work(wire, c))  # type: ignore[misc]
            for contiguous in (False, True)
        )
        assert _equal(ranks[0][0]["view"], copies[0][0]["view"])
        for name, before in given(0).items():
            found = [totals[name] for totals, _ in ranks]
            assert all(f.dtype == dtype and f.shape == before.shape for f in found), name
            assert found[0].stride() == before.stride()
            assert all(_equal(f, found[0]) for f in found), f"the totals of '{name}' differ between ranks"
            if before.numel():
                total = ranks[0][1].results[name].total
                kept = _total([rank.residuals[name] for _, rank in ranks])
                _close(total + kept, _total([given(r)[name] for r in range(size)]), limit, name)
