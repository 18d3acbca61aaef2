"""The effect of the size distinguishes a loss that compares the samples of a micro-batch from a mean over
samples, and not labels that happen to be 0, 1, ..."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.util import cos_sim
from torch import Tensor, nn
from torchmetrics.functional import pairwise_cosine_similarity
from transformers import BertConfig, BertForSequenceClassification, CLIPConfig, CLIPModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.models.clip.modeling_clip import image_text_contrastive_loss

from distributed.config import load
from distributed.data import Source
from distributed.errors import UserError
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.auto_batch import choose_before_run
from distributed.operations.planning.micro_batch_effects import compares_samples, effect_of_size
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.training.objective import Objective

WIDTH = 6
Loss = Callable[[Tensor, Tensor], Tensor]


def pair(number: int = 2) -> list[Tensor]:
    """Samples whose labels are 0, 1, ..."""
    return [torch.randn(number, WIDTH), torch.arange(number)]


def views(output: Tensor) -> tuple[Tensor, Tensor]:
    return output[:, :3], output[:, 3:]


def diagonal(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)))


def with_hard_negatives(output: Tensor, target: Tensor) -> Tensor:
    """Twice as many scores as samples, as of losses with a negative for each anchor."""
    anchors, candidates = views(output)
    scores = anchors @ torch.cat([candidates, candidates.flip(0)]).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def sigmoid_of_pairs(output: Tensor, target: Tensor) -> Tensor:
    """As SigLIP: no cross-entropy."""
    scores = views(output)[0] @ views(output)[1].T
    signs = 2 * torch.eye(len(scores)) - 1
    return -F.logsigmoid(signs * scores).sum(-1).mean()


MEANS: dict[str, Loss] = {
    "cross entropy of a function": lambda output, target: F.cross_entropy(output, target),
    "two classes": lambda output, target: F.cross_entropy(output[:, :2], target),
    "eleven classes": lambda output, target: F.cross_entropy(output.repeat(1, 2)[:, :11], target),
    "log likelihood": lambda output, target: F.nll_loss(output.log_softmax(-1), target),
    "triplet of each sample": lambda output, target: F.triplet_margin_loss(
        output[:, :2], output[:, 2:4], output[:, 4:]
    ),
    "transformers": lambda output, target: ForSequenceClassificationLoss(
        target, output[:, :2], type("Config", (), {"num_labels": 2, "problem_type": None})
    ),
}
IN_BATCH: dict[str, Loss] = {
    "scores on the diagonal": lambda output, target: diagonal(views(output)[0] @ views(output)[1].T),
    "hard negatives": with_hard_negatives,
    "sigmoid of pairs": sigmoid_of_pairs,
    "distances": lambda output, target: torch.cdist(*views(output)).mean(),
    "sentence-transformers": lambda output, target: diagonal(cos_sim(*views(output))),
    "transformers' CLIP": lambda output, target: image_text_contrastive_loss(
        views(output)[0] @ views(output)[1].T
    ),
    "torchmetrics": lambda output, target: diagonal(pairwise_cosine_similarity(*views(output))),
}


@pytest.mark.parametrize("name", [*MEANS, *IN_BATCH])
@pytest.mark.parametrize("number", [1, 2], ids=["one sample", "two samples"])
def test_the_effect_of_the_size_decides(name: str, number: int) -> None:
    loss = {**MEANS, **IN_BATCH}[name]
    model, batch = nn.Linear(WIDTH, WIDTH), pair(number)
    by_loss, by_step = Task(model, loss_fn=loss), Task(model, training_step=lambda m, b: loss(m(b[0]), b[1]))
    for task in (by_loss, by_step):
        assert compares_samples(task, model, batch) is (name in IN_BATCH)
        assert effect_of_size(task, model, batch).startswith("another training") == (name in IN_BATCH)


@pytest.mark.parametrize("name", [*MEANS, *IN_BATCH])
def test_the_oracle_is_the_gradient_of_two_halves(name: str) -> None:
    """In plain PyTorch: the mean of the losses of two halves is that of the whole exactly for a mean."""
    output, target = torch.randn(4, WIDTH), torch.tensor([0, 1, 1, 0])
    loss = {**MEANS, **IN_BATCH}[name]
    halves = (loss(output[:2], target[:2]) + loss(output[2:], target[2:])) / 2
    assert torch.allclose(halves, loss(output, target)) == (name in MEANS)


def small_bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=2, **sizes))


def small_clip() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = {**sizes, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 2}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=4))


def test_a_classifier_of_transformers_with_its_own_loss() -> None:
    ids, bert = torch.ones(2, 4, dtype=torch.long), small_bert()
    batch = {"input_ids": ids, "labels": torch.tensor([0, 1])}
    assert compares_samples(Task(bert), bert, batch) is False
    Objective(is_chosen=True, compares_samples=False)(bert, batch, 2)


def test_a_model_of_transformers_with_an_in_batch_loss() -> None:
    ids, clip = torch.ones(2, 4, dtype=torch.long), small_clip()
    batch = {"input_ids": ids, "pixel_values": torch.zeros(2, 3, 8, 8), "return_loss": True}
    assert compares_samples(Task(clip), clip, batch) is True


@pytest.mark.parametrize("loss", [IN_BATCH["scores on the diagonal"], MEANS["two classes"]])
def test_where_no_effect_is_known_the_targets_of_the_first_micro_batch_decide(loss: Loss) -> None:
    def reads_values(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) * (1.0 if output.detach().sum().item() else 0.0)

    model = nn.Linear(WIDTH, WIDTH)
    assert compares_samples(Task(model, loss_fn=reads_values), model, pair()) is None
    with pytest.raises(UserError, match="compares the samples"):
        Objective(reads_values, is_chosen=True)(model, pair(), 2)


# -- in runs of batch_size=auto ------------------------------------------------------------


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def task_of(loss: Loss, model: nn.Module) -> Task:
    data = Source.of((torch.randn(8, WIDTH), torch.tensor([0, 1] * 4)), "train_loader", shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Task(model, optimizer=optimizer, loss_fn=loss, train_data=data)


def plan_of_two() -> RunPlan:
    given = {"backend": "serial", "device": "cpu", "batch_size": "auto", "global_batch_size": 2}
    return resolve(load(overrides=given), get_catalog(), Facts(), Resources())


@pytest.mark.starts_processes
def test_a_binary_classifier_whose_first_labels_are_0_and_1_is_accepted() -> None:
    plan = choose_before_run(plan_of_two(), task_of(own_loss, nn.Linear(WIDTH, 2)))
    assert (plan.batch.batch_size, plan.compares_samples) == (2, False)
    with pytest.raises(UserError, match="compares the samples"):  # the mutant: labels decide
        Objective(own_loss, is_chosen=True)(nn.Linear(WIDTH, 2), pair(), 2)


def test_a_size_that_is_kept_is_not_refused_by_labels() -> None:
    """A second `fit` predicts nothing, and its first labels may be 0, 1."""
    earlier = {"batch_size": 2, "gradient_accumulation_steps": 1, "data_parallel_size": 1}
    plan = choose_before_run(plan_of_two(), task_of(own_loss, nn.Linear(WIDTH, 2)), earlier=earlier)
    assert (plan.batch.batch_size, plan.compares_samples) == (2, False)


@pytest.mark.starts_processes
def test_an_in_batch_loss_is_refused_before_a_size_is_tried() -> None:
    with pytest.raises(UserError, match="compares the samples of a micro-batch") as raised:
        choose_before_run(plan_of_two(), task_of(sigmoid_of_pairs, nn.Linear(WIDTH, WIDTH)))
    assert (raised.value.field, raised.value.got) == ("batch_size", "auto")
