"""Serve a trained checkpoint with Ray Serve on this host: train or take one, answer one request, end.

    python examples/serve_digits.py
    python examples/serve_digits.py --checkpoint tuned/.../trials/00003/checkpoints/step_00000090 --stay

The checkpoint may come from any torch backend on any number of ranks: its weights are read by name. It
needs `pip install 'distributed-trainer[serve,examples]'`. Only this host is listened to, on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from safetensors.torch import load_file

from distributed import Trainer
from distributed.checkpoint.export import export_safetensors
from distributed.commands.bundled.digits import build_model, load_digits


@serve.deployment
class Digits:
    """Answers 64 numbers in 0..1 with a digit.

    Args:
        weights: what `checkpoint export` writes.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.model = build_model().eval()
        self.model.load_state_dict(weights)

    async def __call__(self, request: Any) -> dict[str, Any]:
        pixels = torch.tensor((await request.json())["pixels"]).reshape(1, 64)
        with torch.inference_mode():
            chances = self.model(pixels).softmax(dim=1)[0]
        return {"digit": int(chances.argmax()), "chance": round(float(chances.max()), 4)}


def train(folder: str) -> str:
    """A checkpoint of the bundled example."""
    training, validation = load_digits()
    history = Trainer(build_model(), batch_size=32, epochs=4, learning_rate=2e-3, checkpoint_dir=folder).fit(
        training, validation
    )
    return str(history.best_checkpoint)


def read_weights(checkpoint: str, folder: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by name, whole, however many ranks saved it."""
    export_safetensors(checkpoint, folder)
    return load_file(str(Path(folder, "model.safetensors")))


def ask(port: int, pixels: torch.Tensor) -> dict[str, Any]:
    """One request over HTTP."""
    body = json.dumps({"pixels": pixels.tolist()}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data=body, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main() -> None:
    """Serve, answer, end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="a folder step_NNNNNNNN; without it, four epochs are trained")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = read_weights(args.checkpoint or train(f"{folder}/checkpoints"), f"{folder}/weights")
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": args.port})
        serve.run(Digits.bind(weights))
        _, (pixels, labels) = load_digits()
        answer = ask(args.port, pixels[0])
        print(f"asked for a {int(labels[0])}, answered {answer['digit']} with chance {answer['chance']}")
        if args.stay:
            print(f"serving at http://127.0.0.1:{args.port}/ until Ctrl-C", flush=True)
            serve.run(Digits.bind(weights), blocking=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
