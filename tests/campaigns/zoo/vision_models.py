"""Models of timm and torchvision, from a folder of their own: `make zoo-vision`.

torchvision's wheel is built for torch with CUDA. Beside the CPU build its operators are missing, its import
fails, and with it that of other packages that find it; so it is no part of the environment. The one operator
that detection needs is defined here in Python.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.campaigns.zoo.entry import Entry

__all__ = ["ENTRIES", "FOLDER"]

FOLDER = Path(__file__).parents[3] / "build" / "zoo"
SIZE, CLASSES = 32, 3


def _suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Non-maximum suppression: indices of the boxes that stay, best first."""
    from torchvision.ops import box_iou

    left, kept = scores.argsort(descending=True, stable=True), []
    while len(left):
        best, others = left[0], left[1:]
        kept.append(best)
        left = others[box_iou(boxes[best][None], boxes[others])[0] <= iou_threshold]
    return torch.stack(kept) if kept else left


def _import_torchvision() -> None:
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _suppress, "CPU")
    _LIBRARIES.append(library)  # its operators live as long
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None


_LIBRARIES: list[Any] = []
_import_torchvision()


class Classifier(nn.Module):
    """A model of timm with BatchNorm in evaluation mode. Ranks find timm by the import of this module."""

    def __init__(self, name: str) -> None:
        import timm

        super().__init__()
        self.body = timm.create_model(name, num_classes=CLASSES)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def images() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (24, 3, SIZE, SIZE)
    found = torch.randn(shape, generator=generator, dtype=torch.float64)
    return [(image, number % CLASSES) for number, image in enumerate(found)]


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Detector(nn.Module):
    """RetinaNet with a small backbone. Its losses are divided by the number of objects of each image, and
    averaged over images: a mean over samples."""

    def __init__(self) -> None:
        from torchvision.models import resnet18
        from torchvision.models.detection import RetinaNet
        from torchvision.models.detection.anchor_utils import AnchorGenerator
        from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

        super().__init__()
        backbone = _resnet_fpn_extractor(
            resnet18(weights=None, norm_layer=_frozen_norm()), trainable_layers=5, returned_layers=[2, 3, 4]
        )
        sizes = tuple((size,) for size in (4, 8, 16, 32))
        anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
        options = {"anchor_generator": anchors, "min_size": SIZE, "max_size": SIZE}
        self.body = RetinaNet(backbone, CLASSES, **options)
        self.double()

    def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.body(list(images), targets)
        return found


def _frozen_norm() -> Any:
    from torchvision.ops import FrozenBatchNorm2d

    return FrozenBatchNorm2d


def scenes() -> list[tuple[Tensor, dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(24):
        corner = torch.randint(0, SIZE // 2, (1 + number % 3, 2), generator=generator).float()
        boxes = torch.cat([corner, corner + 8 + number % 7], dim=1).double()
        labels = torch.randint(0, CLASSES, (len(boxes),), generator=generator)
        image = torch.rand(3, SIZE, SIZE, generator=generator, dtype=torch.float64)
        found.append((image, {"boxes": boxes, "labels": labels}))
    return found


def join_scenes(samples: list[Any]) -> Any:
    return [image for image, _ in samples], [target for _, target in samples]


def detect(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Sum and count: the model returns means over the images."""
    losses = model(*batch)
    return sum(losses.values(), torch.zeros(())) * len(batch[0]), len(batch[0])


def detect_all(model: nn.Module, batch: Any) -> Tensor:
    total, count = detect(model, batch)
    return total / count


EXACT = 1e-9
ENTRIES = {
    "ResNet-18": Entry("timm", partial(Classifier, "resnet18"), images, loss=classify, accuracy=EXACT),
    "EfficientNet": Entry(
        "timm", partial(Classifier, "efficientnet_lite0"), images, loss=classify, accuracy=EXACT
    ),
    "RetinaNet": Entry(
        "torchvision", Detector, scenes, join_scenes, detect_all, {"training_step": detect}, 3, EXACT
    ),
}
"""In float64: in float32, rounding grows to 1e-3 in untrained networks of this depth."""
