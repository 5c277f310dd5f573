#!/usr/bin/env python3
"""Write a Llama checkpoint, or random weights in the shape of a config.json, as GGUF files for llama.cpp.

    python tests/llama-cpp/to_gguf.py --model DIR|random:CONFIG.json --out DIR [--types f32,bf16,q8_0,q4_0] [--ballast LAYERS,FFN]

Writes one file per type, OUT/TYPE.gguf. All matrices have that type; norms are f32. A checkpoint is a
directory with the model.safetensors of a Llama (created by models/recipe) and its tokenizer.json (byte-level
BPE that splits digits, as in the bundled pair).

Random weights have no tokenizer, because measuring speed (forwards.cpp, llama-bench) does not need one. They
have the shape of the engine's random weights but other values, which does not affect speed.

--ballast adds ballast as the engine's `--ballast` does: it grows the model to LAYERS layers and a
feed-forward width of FFN, without changing any logit (engine/src/ballast.rs).
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

TYPES = {"f32": Type.F32, "bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
# Names of a layer's tensors in the checkpoint, and in GGUF.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
STD_DEV = 0.02
SEED = 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory, or random:CONFIG.json for random weights")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="output directory")
    parser.add_argument("--types", default="bf16,q8_0,q4_0", help="matrix types (bf16,q8_0,q4_0)")
    parser.add_argument("--ballast", metavar="LAYERS,FFN", help="number of layers and feed-forward width with ballast")
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    random = settings.model.startswith("random:")
    path = pathlib.Path(settings.model.removeprefix("random:"))
    config = json.loads((path if random else path / "config.json").read_text())
    ballast = tuple(map(int, settings.ballast.split(","))) if settings.ballast else None
    for name in settings.types.split(","):
        tensors = random_tensors(config) if random else stored_tensors(path / "model.safetensors")
        shape, tensors = with_ballast(config, tensors, ballast) if ballast else (config, tensors)
        writer = gguf.GGUFWriter(settings.out / f"{name}.gguf", "llama")
        add_shape(writer, shape)
        writer.add_file_type(FILE_TYPES[name])
        add_tokens(writer, shape, None if random else path)
        for source, values in tensors:
            add_tensor(writer, shape, name, source, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        print(settings.out / f"{name}.gguf")


def head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_shape(writer, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads", config["num_attention_heads"]))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def rope_theta(config):
    return config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)


def add_tokens(writer, config, model):
    """Adds the tokenizer, or `none` for random weights."""
    if model is None:
        writer.add_tokenizer_model("none")
        return
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {index: text for text, index in tokenizer["model"]["vocab"].items()} | special
    names = [tokens.get(index, f"[unused {index}]") for index in range(config["vocab_size"])]
    token_type = lambda index: gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([token_type(index) for index in range(len(names))])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)


def random_tensors(config):
    """Yields the name and random values of each tensor of a Llama of this shape."""
    random = np.random.default_rng(SEED)
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * dim, config.get("num_key_value_heads", config["num_attention_heads"]) * dim
    matrix = lambda *shape: random.standard_normal(shape, dtype=np.float32) * np.float32(STD_DEV)
    norm = lambda: np.ones(hidden, dtype=np.float32)
    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name in LAYER:
            yield f"model.layers.{layer}.{name}.weight", matrix(*shapes[name]) if name in shapes else norm()
    yield "model.norm.weight", norm()
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", matrix(config["vocab_size"], hidden)


def stored_tensors(path):
    """Yields the name and f32 values of each tensor of a safetensors file. numpy cannot read bf16."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        stored = data[begin:end]
        if tensor["dtype"] == "BF16":
            values = (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = stored.view({"F32": "<f4", "F16": "<f2"}[tensor["dtype"]]).astype(np.float32)
        yield name, values.reshape(tensor["shape"])


def with_ballast(config, tensors, ballast):
    """Returns the configuration and tensors with ballast: random gate rows, zero up rows, zero down columns,
    and layers that add zeros."""
    layers, ffn = ballast
    original = config["num_hidden_layers"]
    random = np.random.default_rng(SEED)

    def tensors_with_ballast():
        for name, values in tensors:
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                added = np.zeros((ffn - len(values), values.shape[1]), np.float32)
                if "gate" in name:
                    added = random.standard_normal(added.shape, dtype=np.float32) * np.float32(STD_DEV)
                values = np.concatenate([values, added])
            elif name.endswith("down_proj.weight"):
                values = np.pad(values, [(0, 0), (0, ffn - values.shape[1])])
            yield name, values
            if name.startswith("model.layers.0."):
                is_zero = name.endswith(("o_proj.weight", "down_proj.weight"))
                for layer in range(original, layers):
                    yield name.replace(".0.", f".{layer}."), np.zeros_like(values) if is_zero else values

    return config | {"num_hidden_layers": layers, "intermediate_size": ffn}, tensors_with_ballast()


def add_tensor(writer, config, name, source, values):
    if values.ndim == 1:
        writer.add_tensor(gguf_name(source), values)
        return
    if source.endswith(("q_proj.weight", "k_proj.weight")):
        values = interleave_halves(values, head_dim(config))
    quantized = gguf.quants.quantize(values, TYPES[name])
    writer.add_tensor(gguf_name(source), quantized, raw_dtype=TYPES[name])


def interleave_halves(matrix, dim):
    """Reorders the channels of each head for RoPE: llama.cpp rotates adjacent channels together, our checkpoints
    channel i with channel i + dim / 2."""
    heads = matrix.reshape(-1, 2, dim // 2, matrix.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(matrix.shape)


def gguf_name(source):
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if source in names:
        return names[source]
    layer, name = source.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{LAYER[name]}.weight"


if __name__ == "__main__":
    main()
