#!/usr/bin/env python3
"""Add ballast to a Llama checkpoint: it draws the same tokens, but a step costs as much as that of a bigger model.

    python models/recipe/ballast.py --model models/demo/target --out DIR [--layers 20] [--ffn 16384]

The bundled target is so small that verifying a token costs as much as drafting one. With ballast the gain from drafting can be
measured for a bigger target with real text, real acceptance and real arithmetic, without training such a target:

- every feed-forward layer is widened: random rows in gate_proj and up_proj, zero columns in down_proj, so that the output is the same;
- layers are added whose o_proj and down_proj are zero, so that they leave the residual stream unchanged.

The engine computes all products (it does not look for zeros), reads all weights and stores K and V of all layers. The results are
those of the original up to the order of some sums.
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

WIDENED_ROWS = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
ZERO_IN_ADDED_LAYERS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def main():
    settings = parse_arguments()
    config = json.loads((settings.model / "config.json").read_text())
    layers, ffn = config["num_hidden_layers"], config["intermediate_size"]
    if settings.layers < layers or settings.ffn < ffn:
        raise SystemExit(f"the model has {layers} layers and a feed-forward width of {ffn}: ballast can only make it larger")
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = widen(read(settings.model), settings.ffn - ffn, generator)
    for layer in range(layers, settings.layers):
        tensors |= identity_layer(tensors, layer, generator)

    settings.out.mkdir(parents=True, exist_ok=True)
    for path in settings.model.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, settings.out / path.name)
    config |= {"num_hidden_layers": settings.layers, "intermediate_size": settings.ffn}
    (settings.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, settings.out / "model.safetensors", metadata={"format": "pt"})
    print(f"{settings.out}: {sum(tensor.numel() for tensor in tensors.values()):,} parameters")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="checkpoint directory with one model.safetensors")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="output directory")
    parser.add_argument("--layers", type=int, default=20, help="number of layers with ballast (20)")
    parser.add_argument("--ffn", type=int, default=16384, help="feed-forward width with ballast (16384)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random rows (1)")
    return parser.parse_args()


def read(model):
    with safe_open(model / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def widen(tensors, num_added, generator):
    """Adds `num_added` channels to every feed-forward layer; their columns of down_proj are zero."""
    widened = {}
    for name, tensor in tensors.items():
        if name.endswith(WIDENED_ROWS):
            tensor = torch.cat([tensor, random_like(tensor, (num_added, tensor.shape[1]), generator)])
        elif name.endswith("mlp.down_proj.weight"):
            tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], num_added)], dim=1)
        widened[name] = tensor.contiguous()
    return widened


def identity_layer(tensors, layer, generator):
    """A layer with the shape of the first one that leaves the residual stream unchanged."""
    added = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.layers.0."):
            continue
        added_name = name.replace("model.layers.0.", f"model.layers.{layer}.")
        if name.endswith(ZERO_IN_ADDED_LAYERS):
            added[added_name] = torch.zeros_like(tensor)
        elif tensor.dim() == 1:
            added[added_name] = tensor.clone()
        else:
            added[added_name] = random_like(tensor, tensor.shape, generator)
    return added


def random_like(tensor, shape, generator):
    """Random values with the standard deviation of the tensor."""
    return (torch.randn(shape, generator=generator) * tensor.float().std()).to(tensor.dtype)


if __name__ == "__main__":
    main()
