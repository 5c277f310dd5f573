#!/usr/bin/env python3
"""Load a Llama checkpoint with ballast: it draws the same tokens, but a step costs what a bigger model's step costs.

    python models/recipe/ballast.py --model models/demo/target --out DIR [--layers 20] [--ffn 16384]

The bundled target is so small that checking a guess costs as much as making one. What drafting gains from a target worth
drafting for can be measured with real text, real acceptance and real arithmetic once the target is heavier, without training one:

- every feed-forward layer is widened: random rows in gate_proj and up_proj, zero columns in down_proj, so that they add nothing;
- layers are added whose o_proj and down_proj are zero, so that the residual stream passes through them as it came.

The engine does all the work (it does not look for zeros), reads all the bytes and keeps K and V of all the layers. The function is
the original's but for the order of some sums.
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
        raise SystemExit(f"the model has {layers} layers and a feed-forward width of {ffn}: ballast can add, not take away")
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = widen(read(settings.model), settings.ffn - ffn, generator)
    for layer in range(layers, settings.layers):
        tensors |= passing_layer(tensors, layer, generator)

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
    parser.add_argument("--model", type=pathlib.Path, required=True, help="the checkpoint, one model.safetensors")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where the heavier one goes")
    parser.add_argument("--layers", type=int, default=20, help="layers of the heavier one (20)")
    parser.add_argument("--ffn", type=int, default=16384, help="its feed-forward width (16384)")
    parser.add_argument("--seed", type=int, default=1, help="of the random rows (1)")
    return parser.parse_args()


def read(model):
    with safe_open(model / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def widen(tensors, more, generator):
    """Every feed-forward layer with `more` channels, whose way out is zero."""
    wide = {}
    for name, tensor in tensors.items():
        if name.endswith(WIDENED_ROWS):
            tensor = torch.cat([tensor, like(tensor, (more, tensor.shape[1]), generator)])
        elif name.endswith("mlp.down_proj.weight"):
            tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], more)], dim=1)
        wide[name] = tensor.contiguous()
    return wide


def passing_layer(tensors, layer, generator):
    """A layer shaped as the first one that adds nothing to the residual stream."""
    added = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.layers.0."):
            continue
        own_name = name.replace("model.layers.0.", f"model.layers.{layer}.")
        if name.endswith(ZERO_IN_ADDED_LAYERS):
            added[own_name] = torch.zeros_like(tensor)
        elif tensor.dim() == 1:
            added[own_name] = tensor.clone()
        else:
            added[own_name] = like(tensor, tensor.shape, generator)
    return added


def like(tensor, shape, generator):
    """Random numbers as large as the tensor's own."""
    return (torch.randn(shape, generator=generator) * tensor.float().std()).to(tensor.dtype)


if __name__ == "__main__":
    main()
