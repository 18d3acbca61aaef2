"""Facts that are collected from a model: counted by hand, without data, and refused where they would be
wrong."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import mse_loss

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.task import Task
from distributed.operations.planning.collect_facts import collect_facts
from distributed.operations.planning.optimizer_facts import optimizer_facts
from distributed.operations.planning.private_copies import unchanged_modules
from distributed.operations.planning.task_facts import TaskFacts
from distributed.planner.estimates.memory import predict_memory
from distributed.planner.estimates.model_facts import Kind, ModelFacts, Size
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.work_facts import flops_of
from tests.operations.planning.saved_bytes import saved_bytes

WIDTH = 16


class Block(nn.Module):
    """A layer whose ReLU saves its result for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Tower(nn.Module):
    """Two blocks between two layers, the first of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("offset", torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(number: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(number, 8), torch.randn(number, 1)


def facts_of(model: nn.Module, **given: Any) -> ModelFacts:
    return collect_facts(model, batch(), loss_fn=nn.MSELoss(), **given)


def test_counts_are_those_done_by_hand() -> None:
    facts = facts_of(Tower())
    assert facts.num_parameters == 8 * 16 + 16 + 2 * (16 * 16 + 16) + 16 + 1
    model, first, second = facts.blocks
    assert (model.name, first.name, second.name) == ("", "blocks.0", "blocks.1")
    held = [(p.block, p.numel, p.trained) for p in facts.parameters]
    assert held[:4] == [(0, 128, False), (0, 16, False), (1, 256, True), (1, 16, True)]
    assert held[4:] == [(2, 256, True), (2, 16, True), (0, 16, True), (0, 1, True)]
    # A multiplication and an addition for each weight and sample.
    flops = [[flops_of(block.forward, number) for number in (0, 1)] for block in facts.work.blocks]
    assert flops == [[0, 2 * 16 * 8 + 2 * 16], [0, 2 * 16 * 16], [0, 2 * 16 * 16]]
    # The output is what ReLU saves; the result of the layer is gone.
    assert saved_bytes(facts, 1) == Size(0, 16 * 4)
    assert facts.buffers == (64,)
    assert [p.name for p in facts.parameters if not p.trained] == ["first.weight", "first.bias"]
    assert sorted(facts.first.gradients) == [2, 3, 4, 5, 6, 7]


def test_events_lie_in_their_blocks() -> None:
    events = [(e.kind, e.number) for e in facts_of(Tower()).first.events if e.kind > Kind.GRADIENT]
    assert events == [
        (Kind.ENTER_FORWARD, 0),
        (Kind.ENTER_FORWARD, 1),
        (Kind.LEAVE_FORWARD, 1),
        (Kind.ENTER_FORWARD, 2),
        (Kind.LEAVE_FORWARD, 2),
        (Kind.LEAVE_FORWARD, 0),
        (Kind.BACKWARD, 0),
        (Kind.ENTER_BACKWARD, 0),
        (Kind.ENTER_BACKWARD, 2),
        (Kind.LEAVE_BACKWARD, 2),
        (Kind.ENTER_BACKWARD, 1),
    ]


def test_a_model_without_data_has_the_same_facts() -> None:
    with torch.device("meta"):
        hollow = Tower()
    assert facts_of(hollow) == facts_of(Tower())


def test_the_size_of_the_sample_batch_does_not_matter() -> None:
    model = Tower()
    small, large = (collect_facts(model, batch(n), loss_fn=nn.MSELoss()) for n in (1, 50))
    assert small == large


def test_the_model_is_left_as_it_was() -> None:
    model = Tower().eval()
    before = copy.deepcopy(model.state_dict())
    facts_of(model)
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_activation_checkpointing_trades_what_is_saved() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(6)]
    facts = facts_of(nn.Sequential(*blocks, nn.Linear(8, 1)))
    plain, again = (
        predict_memory(facts, Split(ParallelDims(), "serial", micro_batch=100, activation_checkpointing=on))
        for on in (False, True)
    )
    assert again.activations < plain.activations
    assert again.parameters == plain.parameters


def test_half_precision_saves_half_of_a_layer() -> None:
    """Autocast adds casts of weights and inputs; what the blocks save is half."""
    full, half = facts_of(Tower()), facts_of(Tower(), precision="bf16")
    assert saved_bytes(half, 2).per_sample == saved_bytes(full, 2).per_sample / 2
    assert half.precision == "bf16"


class Twice(nn.Module):
    """Calls its blocks two times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


def test_blocks_that_are_called_again_are_refused_under_fsdp() -> None:
    samples = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    facts = collect_facts(Twice(), samples, loss_fn=nn.MSELoss())
    assert [block.calls for block in facts.blocks] == [1, 2, 2]
    assert predict_memory(facts, Split(ParallelDims(data=2), "pytorch-ddp")).total
    with pytest.raises(UserError, match="several times"):
        predict_memory(facts, Split(ParallelDims(shard=2), "fsdp"))


def test_a_training_step_is_recorded() -> None:
    def step(model: nn.Module, samples: Any) -> Tensor:
        x, y = samples
        return mse_loss(model(x), y)

    facts = collect_facts(Tower(), batch(), training_step=step)
    assert sorted(facts.first.gradients) == [2, 3, 4, 5, 6, 7]


def test_batch_norm_is_not_recomputed() -> None:
    """The statistics would see every batch twice: such a plan is refused, and facts are there without it."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)]
    facts = facts_of(nn.Sequential(*blocks, nn.Linear(8, 1)))
    assert facts.first_recomputed is None
    with pytest.raises(UserError) as caught:
        predict_memory(facts, Split(ParallelDims(), "serial", activation_checkpointing=True))
    assert caught.value.field == "activation_checkpointing"


class Scaled(nn.Module):
    """A loss with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output * self.scale, target)


TEACHER = nn.Linear(8, 1)


def moves_a_loss() -> tuple[dict[str, Any], list[nn.Module]]:
    loss = Scaled()

    def step(model: nn.Module, samples: Any) -> Tensor:
        return loss.double().float()(model(samples[0]), samples[1])

    return {"training_step": step}, [loss]


def moves_a_module_of_the_file() -> tuple[dict[str, Any], list[nn.Module]]:
    def step(model: nn.Module, samples: Any) -> Tensor:
        target = TEACHER.double().float()(samples[0])
        return mse_loss(model(samples[0]), target)

    return {"training_step": step}, [TEACHER]


class Step:
    """A training step with a module and a list that it fills."""

    def __init__(self) -> None:
        self.loss, self.seen = Scaled(), list[Tensor]()

    def step(self, model: nn.Module, samples: Any) -> Tensor:
        self.loss.double().float()
        self.seen.append(model(samples[0]))
        return self.loss(self.seen[-1], samples[1])


def moves_its_own() -> tuple[dict[str, Any], list[nn.Module]]:
    own = Step()
    return {"training_step": own.step}, [own.loss]


@pytest.mark.parametrize("made", [moves_a_loss, moves_a_module_of_the_file, moves_its_own])
def test_what_the_user_gave_keeps_its_tensors(made: Any) -> None:
    """A module of the user is converted while tensors are fake, as on the way to a GPU."""
    given, modules = made()
    before = [dict(module.state_dict()) for module in modules]
    collect_facts(Tower(), batch(), **given)
    for module, state in zip(modules, before, strict=True):
        assert module.state_dict().keys() == state.keys()
        for name, value in module.state_dict().items():
            assert not isinstance(value, FakeTensor)
            assert value.data_ptr() == state[name].data_ptr()
    own = getattr(given["training_step"], "__self__", None)
    assert not getattr(own, "seen", None)


def test_recurrent_layers_keep_their_list_of_weights() -> None:
    layer = nn.Sequential(nn.LSTM(8, 2))
    with unchanged_modules(), FakeTensorMode(allow_non_fake_inputs=True):
        layer.double()
    assert layer(torch.zeros(2, 8))[0].dtype == torch.float32
    alone = nn.LSTM(8, 2)
    with unchanged_modules(), FakeTensorMode(allow_non_fake_inputs=True):
        alone.double()
    assert alone(torch.zeros(2, 8))[0].dtype == torch.float32


def test_a_loss_on_another_device_is_not_moved() -> None:
    """`collect_facts` moves losses to the device of the rank: here from the meta device."""
    loss = Scaled().to("meta")
    collect_facts(Tower(), batch(), loss_fn=nn.MSELoss())
    with pytest.raises(NotImplementedError):
        loss.to("cpu")  # without values, it can only be moved where tensors are fake
    collect_facts(Tower(), batch(), loss_fn=loss)
    assert loss.scale.device.type == "meta"
    assert not isinstance(loss.scale, FakeTensor)


def test_a_step_that_calls_the_model_which_it_holds_is_recorded() -> None:
    model = Tower()

    def held(_: nn.Module, samples: Any) -> Tensor:
        return mse_loss(model(samples[0]), samples[1])

    def passed(given: nn.Module, samples: Any) -> Tensor:
        return mse_loss(given(samples[0]), samples[1])

    one, other = (collect_facts(model, batch(), training_step=step) for step in (held, passed))
    assert one == other


def test_what_cannot_be_copied_is_refused() -> None:
    lock = threading.Lock()

    def step(model: nn.Module, samples: Any) -> Tensor:
        with lock:
            return mse_loss(model(samples[0]), samples[1])

    with pytest.raises(UserError, match="cannot be copied") as caught:
        collect_facts(Tower(), batch(), training_step=step)
    assert caught.value.field == "training_step"
    assert "lock" in str(caught.value.got)


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_those_of_training(training: bool) -> None:
    """The model itself trains in any case; a layer that was set to evaluation in a model in training mode
    stays there. Dropout keeps a mask for backward where it trains."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(8, 1))
    facts = facts_of(model)
    saved = [saved_bytes(facts, block).per_sample for block in (1, 2)]
    model.train(training)
    blocks[1].eval()
    facts = facts_of(model)
    found = [saved_bytes(facts, block).per_sample for block in (1, 2)]
    assert saved[0] == saved[1]
    assert found[0] == saved[0]
    assert (found[1] < saved[1]) == training


class DependsOnValues(nn.Module):
    """Control flow that fake tensors cannot follow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "branch" and x.sum() > 0:
            x = x + 1
        if self.way == "number":
            x = x * x.max().item()
        if self.way == "shape":
            x = x[x[:, 0] > 0]
        return self.linear(x)


@pytest.mark.parametrize("way", ["branch", "number", "shape"])
def test_values_that_decide_are_an_error(way: str) -> None:
    with pytest.raises(UserError, match="depends on values") as caught:
        facts_of(DependsOnValues(way))
    assert caught.value.field == "model"
    assert "`plan --parameters`" in caught.value.remedy


class DependsOnSamples(nn.Module):
    """One more operation for larger batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 2 if len(x) > 15 else x)


def test_operations_that_depend_on_the_number_of_samples_are_an_error() -> None:
    with pytest.raises(UserError, match="depends on the number of samples") as caught:
        facts_of(DependsOnSamples())
    assert caught.value.field == "batch_size"


@pytest.mark.parametrize("classes", [4, 8])
def test_as_many_classes_as_samples_are_no_pairs(classes: int) -> None:
    """Scores of as many samples as classes are checked for in-batch losses by their values."""
    model, samples = nn.Linear(8, classes), (torch.randn(classes, 8), torch.arange(classes))
    facts = collect_facts(model, samples)
    assert Size(0, 4 * classes) in facts.first.sizes


def test_a_batch_without_samples_is_an_error() -> None:
    with pytest.raises(UserError, match="first dimension") as caught:
        collect_facts(Tower(), [torch.tensor(1.0)], loss_fn=nn.MSELoss())
    assert caught.value.field == "batch"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("name", "momentum", "state"),
    [("adamw", 0.0, 2.0), ("adam", 0.0, 2.0), ("sgd", 0.9, 1.0), ("sgd", 0.0, 0.0)],
)
def test_optimizers_are_measured(name: str, momentum: float, state: float, foreach: bool) -> None:
    """Two tensors of the size of the parameter, or one of momentum."""
    settings = {"momentum": momentum} if momentum else {}
    facts = optimizer_facts(name, foreach=foreach, **settings)
    assert facts.state == state
    assert facts.at_once == foreach


@pytest.mark.parametrize(
    ("settings", "state", "workspace"),
    [({"fused": True}, 2.0, 0.0), ({"amsgrad": True}, 3.0, 2.0), ({"maximize": True}, 2.0, 3.0)],
)
def test_settings_of_an_optimizer_object_are_measured(
    settings: dict[str, bool], state: float, workspace: float
) -> None:
    """A fused update needs no temporary memory, ``amsgrad`` has a third moment, ``maximize`` copies the
    gradient."""
    facts = optimizer_facts("adamw", **settings)
    assert (facts.state, facts.workspace) == (state, workspace)
    given = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], **settings)  # type: ignore[arg-type]
    assert (
        TaskFacts(Task(Tower(), optimizer=given)).optimizer(DistributedConfig())[1].items()
        >= settings.items()
    )


def test_a_loop_over_parameters_carries_a_tensor_of_the_one_before() -> None:
    """AdamW has a name for the divisor of its update; the one of the next parameter takes it over."""
    assert optimizer_facts("adamw").carried == 1.0
    assert optimizer_facts("adamw", foreach=True).carried == 0.0
    assert optimizer_facts("adamw", fused=True).carried == 0.0


@pytest.mark.parametrize(("name", "more"), [("adamw", 0.0), ("adam", 1.0), ("sgd", 1.0)])
def test_weight_decay_of_gradients_needs_a_copy_of_them(name: str, more: float) -> None:
    """Adam and SGD make a gradient with the decay; AdamW scales the parameter in place."""
    without, decayed = (optimizer_facts(name, weight_decay=decay) for decay in (0.0, 0.1))
    assert decayed.workspace == without.workspace + more


def test_settings_of_groups_are_those_that_need_most() -> None:
    """A group may have a momentum that the optimizer's defaults have not."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second], "weight_decay": 0.1}]
    _, found = TaskFacts(Task(Tower(), optimizer=torch.optim.SGD(groups, lr=0.1))).optimizer(
        DistributedConfig()
    )
    assert (found["momentum"], found["weight_decay"]) == (0.9, 0.1)
