"""Models of other libraries with batches of other forms, and losses that the user computes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.campaigns.zoo.entry import Entry

__all__ = ["ENTRIES"]


# -- diffusers -------------------------------------------------------------------------------------


def unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4, dropout=0.0,
    )  # fmt: skip


def noisy_images() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "noisy": torch.randn(1, 8, 8, generator=generator),
            "noise": torch.randn(1, 8, 8, generator=generator),
            "step": torch.randint(0, 1000, (), generator=generator),
        }
        for _ in range(24)
    ]


def denoise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["noisy"], batch["step"]).sample, batch["noise"])


# -- torch_geometric -------------------------------------------------------------------------------


class Graphs(nn.Module):
    """Classifies graphs of other sizes."""

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second, self.last = GCNConv(4, 8), GCNConv(8, 8), nn.Linear(8, 3)

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        result: Tensor = self.last(global_mean_pool(x, batch.batch))
        return result


def graphs() -> list[Any]:
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(24):
        nodes = 3 + number % 5
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
        x = torch.randn(nodes, 4, generator=generator)
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 3])))
    return found


def join_graphs(samples: list[Any]) -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list(samples)


def classify_graphs(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch), batch.y)


class Nodes(Graphs):
    """Classifies nodes."""

    def forward(self, batch: Any) -> Tensor:
        hidden = self.second(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)
        result: Tensor = self.last(hidden)
        return result


def classify_nodes(model: nn.Module, batch: Any) -> Tensor:
    """The mean over nodes, whose number differs from graph to graph."""
    return F.cross_entropy(model(batch), batch.y[batch.batch])


# -- sentence_transformers -------------------------------------------------------------------------

WORDS = [f"w{number}" for number in range(40)]


def sentence_model() -> nn.Module:
    """Averages embeddings of words."""
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, **{w: n for n, w in enumerate(WORDS, 1)}}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return st.SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")


def sentence_pairs() -> list[tuple[str, str, float]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(24):
        words = [WORDS[i] for i in torch.randint(0, 40, (6 + number % 4,), generator=generator).tolist()]
        found.append((" ".join(words[:4]), " ".join(words[2:]), (number % 5) / 4))
    return found


def join_sentences(samples: list[tuple[str, str, float]]) -> Any:
    tokenize: Any = sentence_model()[0]  # type: ignore[index]
    firsts, seconds, scores = zip(*samples, strict=True)
    return tokenize.preprocess(list(firsts)), tokenize.preprocess(list(seconds)), torch.tensor(scores)


def similarity(model: nn.Module, batch: Any) -> Tensor:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    result: Tensor = CosineSimilarityLoss(model)([dict(batch[0]), dict(batch[1])], batch[2])
    return result


ENTRIES = {
    "StaticEmbedding": Entry(
        "sentence_transformers", sentence_model, sentence_pairs, join_sentences, similarity,
        {"training_step": similarity}, 2,
    ),
    "UNet2D": Entry(
        "diffusers", unet, noisy_images, loss=denoise, given={"training_step": denoise}, lines=2
    ),
    "GCN, graphs": Entry(
        "torch_geometric", Graphs, graphs, join_graphs, classify_graphs,
        {"training_step": classify_graphs}, 2,
    ),
    "GCN, nodes": Entry(
        "torch_geometric", Nodes, graphs, join_graphs, classify_nodes,
        {"training_step": classify_nodes}, 2,
    ),
}  # fmt: skip
