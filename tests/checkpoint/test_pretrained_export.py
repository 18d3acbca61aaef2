"""Checkpoints of models of transformers and PEFT: adapters alone, exact resumes, exports that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import load_full_model
from distributed.cli import main
from distributed.errors import UserError
from distributed.interfaces.callback import Callback, Context
from distributed.testing.rank_pool import RankPool
from tests.campaigns.backends import BACKENDS
from tests.campaigns.zoo import transformers_models as zoo
from tests.campaigns.zoo.table import ENTRIES
from tests.support.training import make_trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with closing(RankPool()) as ranks:
        yield ranks


def trainer_of(
    model: Any, backend: str, pool: RankPool, folder: Path, steps: int, **checkpoint: Any
) -> Trainer:
    name, ranks, options = BACKENDS[backend]
    return make_trainer(
        model, ranks, pool, folder=folder, backend=name, batch_size=2, optimizer="adamw",
        learning_rate=0.01, max_steps=steps, data={"shuffle": False}, seed=3, resume_from_checkpoint=True,
        checkpoint={"every_n_steps": 2, **checkpoint}, **options,
    )  # fmt: skip


def fit(trainer: Trainer) -> str:
    found = trainer.fit(DataLoader(zoo.ragged(), batch_size=2, collate_fn=zoo.pad)).checkpoint
    assert found is not None
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def saved_parameters(path: str) -> set[str]:
    return {name for key, name in PortableReader(path).tensors() if key == "model"}


# -- adapters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "ddp 2", "fsdp 2", "zero 1", "zero 3", "horovod 2"])
def test_a_checkpoint_of_an_adapter_is_small_and_resumes_exactly(
    backend: str, pool: RankPool, tmp_path: Path
) -> None:
    whole = ENTRIES["Llama with LoRA"].model()
    fit(trainer_of(whole, backend, pool, tmp_path / "whole", 4))
    first = ENTRIES["Llama with LoRA"].model()
    path = fit(trainer_of(first, backend, pool, tmp_path / "halves", 2))
    trainable = {name for name, p in first.named_parameters() if p.requires_grad}
    assert saved_parameters(path) == trainable
    second = ENTRIES["Llama with LoRA"].model()
    fit(trainer_of(second, backend, pool, tmp_path / "halves", 4))
    assert largest(weights(second), weights(whole)) == 0.0
    assert largest(weights(second), weights(first)) > 0.0


def test_it_resumes_under_another_backend(pool: RankPool, tmp_path: Path) -> None:
    models = [ENTRIES["Llama with LoRA"].model() for _ in range(3)]
    fit(trainer_of(models[0], "ddp 2", pool, tmp_path / "whole", 4))
    fit(trainer_of(models[1], "fsdp 2", pool, tmp_path / "halves", 2))
    fit(trainer_of(models[2], "zero 3", pool, tmp_path / "halves", 4))
    assert largest(weights(models[2]), weights(models[0])) < 1e-5


@pytest.mark.parametrize("backend", ["serial", "fsdp 2", "zero 3"])
def test_another_base_model_is_refused(backend: str, pool: RankPool, tmp_path: Path) -> None:
    fit(trainer_of(ENTRIES["Llama with LoRA"].model(), backend, pool, tmp_path, 2))
    other = ENTRIES["Llama with LoRA"].model()
    with torch.no_grad():
        embedding: Any = other.get_input_embeddings()  # type: ignore[operator]
        embedding.weight[3, 1] += 1e-4
    with pytest.raises(UserError, match=r"leaves out frozen parameters.*embed_tokens") as caught:
        fit(trainer_of(other, backend, pool, tmp_path, 4))
    assert "pretrained weights with which the run began" in str(caught.value.remedy)


def test_a_frozen_parameter_that_changes_is_saved(pool: RankPool, tmp_path: Path) -> None:
    """Such as a teacher's, which a callback averages."""

    class Average(Callback):
        all_ranks = True

        def on_step_end(self, context: Context) -> None:
            with torch.no_grad():
                teacher, student = context.model[2], context.model[0]
                teacher.weight.lerp_(student.weight, 0.1)

    def model() -> nn.Module:
        torch.manual_seed(0)
        built = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in built[1:]:
            layer.requires_grad_(False)
        return built

    found = []
    for folder, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        built = model()
        trainer = trainer_of(built, "ddp 2", pool, tmp_path / folder, steps, trainable_only=True)
        trainer.callbacks = [Average()]
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        path = trainer.fit((x, torch.arange(16) % 4)).checkpoint
        found.append(weights(built))
        assert path is not None
        assert saved_parameters(path) == {"0.weight", "0.bias", "2.weight"}
    assert largest(found[0], found[2]) == 0.0
    loaded = model()
    load_full_model(PortableReader(path), loaded)
    assert largest(weights(loaded), found[0]) == 0.0
    with torch.no_grad():
        loaded[1].bias.add_(1.0)  # type: ignore[operator]
    with pytest.raises(UserError, match=r"leaves out frozen parameters.*'1.bias'"):
        load_full_model(PortableReader(path), loaded)


def test_complete_checkpoints_of_an_adapter_on_request(pool: RankPool, tmp_path: Path) -> None:
    model = ENTRIES["Llama with LoRA"].model()
    path = fit(trainer_of(model, "serial", pool, tmp_path, 2, trainable_only=False))
    assert saved_parameters(path) == {name for name, _ in model.named_parameters()}


# -- exports -----------------------------------------------------------------------------------------


def output_of(model: nn.Module) -> Tensor:
    result: Any = model.eval()(**zoo.pad(zoo.ragged()[:3]))
    logits: Tensor = result.logits.detach()
    return logits


def test_an_exported_adapter_is_read_by_peft(pool: RankPool, tmp_path: Path) -> None:
    model = ENTRIES["Llama with LoRA"].model()
    fit(trainer_of(model, "fsdp 2", pool, tmp_path / "saved", 2))
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--output", str(tmp_path / "adapter")]) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json"}
    base = ENTRIES["Llama with LoRA"].model().unload()  # type: ignore[operator]
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(output_of(loaded), output_of(model))


def test_a_merged_model_is_read_by_transformers(pool: RankPool, tmp_path: Path) -> None:
    model = ENTRIES["Llama with LoRA"].model()
    base = ENTRIES["Llama with LoRA"].model().unload()  # type: ignore[operator]
    base.save_pretrained(tmp_path / "base")
    fit(trainer_of(model, "serial", pool, tmp_path / "saved", 2))
    arguments = ["checkpoint", "export", str(tmp_path / "saved"), "--output", str(tmp_path / "merged")]
    assert main([*arguments, "--merge-into", str(tmp_path / "base")]) == 0
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(output_of(loaded), output_of(model), atol=1e-6)
    assert not torch.allclose(output_of(loaded), output_of(base), atol=1e-6)
    assert main([*arguments, "--merge-into", str(tmp_path / "base")]) == 2
    assert main([*arguments[:-1], str(tmp_path / "other"), "--merge-into", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT, masked words", "T5", "ViT", "Whisper", "Mixtral"])
def test_an_exported_model_is_read_by_from_pretrained(name: str, pool: RankPool, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    model = entry.model()
    trainer = trainer_of(model, "serial", pool, tmp_path / "saved", 2)
    trainer.fit(DataLoader(entry.samples(), batch_size=2, collate_fn=entry.collate))
    output = tmp_path / "model"
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--output", str(output)]) == 0
    loaded, report = type(model).from_pretrained(output, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert largest(weights(loaded), weights(model)) == 0.0
    assert json.loads((output / "config.json").read_text())["architectures"] == [type(model).__name__]


def test_an_export_has_the_dtype_that_it_says(pool: RankPool, tmp_path: Path) -> None:
    fit(trainer_of(ENTRIES["Llama"].model(), "serial", pool, tmp_path / "saved", 2))
    arguments = ["checkpoint", "export", str(tmp_path / "saved"), "--output", str(tmp_path / "model")]
    assert main([*arguments, "--dtype", "bf16"]) == 0
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_weights_that_are_no_whole_model_are_not_exported(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ENTRIES["Llama"].model()
    model.lm_head.requires_grad_(False)  # type: ignore[operator]
    fit(trainer_of(model, "serial", pool, tmp_path / "saved", 2, trainable_only=True))
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--output", str(tmp_path / "model")]) == 2
    assert "leaves out 1 frozen parameters, such as 'lm_head.weight'" in capsys.readouterr().err
