#!/usr/bin/env python3
"""Creates the golden checkpoints in this directory: tiny random models of every family and rope variant, as transformers
saves them, and the f32 results of transformers on the CPU.

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers safetensors
    /tmp/golden/bin/python engine/tests/golden/make_golden.py

A case is a directory: the checkpoint, `expected.json` (prompt, greedy continuation, the rows whose logits are kept) and
`expected.safetensors` (`logits`, f32 [rows, vocab]). `demo/` holds the same for the bundled pair, without the checkpoints.
Nothing at test time needs Python. Made with torch 2.15 and transformers 5.23.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[2] / "models" / "demo"
PROMPT_LEN, GREEDY_LEN, ROW_STEP = 104, 12, 5
# Minimum gap between the two largest logits of a greedy step. Tokens are compared by ==, so no step may be a near tie, which
# includes logits within the tests' tolerance.
MIN_MARGIN = 2e-2
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

BASE = dict(
    vocab_size=112, hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, hidden_act="silu",
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=3,
)
LLAMA = dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama")
MISTRAL = dict(BASE, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
QWEN2 = dict(BASE, architectures=["Qwen2ForCausalLM"], model_type="qwen2")
QWEN3 = dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=12)

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(factor=4.0, original_max_position_embeddings=32)


def old(theta=10000.0, **scaling):
    """transformers 4: rope_theta beside rope_scaling."""
    return dict(rope_theta=theta, rope_scaling=scaling or None)


def new(theta=10000.0, rope_type="default", **rest):
    """transformers 5: rope_parameters."""
    return dict(rope_parameters=dict(rope_theta=theta, rope_type=rope_type, **rest))


# name -> (stored dtype, sharded, config)
CASES = {
    "llama_tied": ("f32", False, dict(LLAMA, **new(), tie_word_embeddings=True)),
    "llama_biases_mha": ("bf16", False, dict(
        LLAMA, **old(), attention_bias=True, mlp_bias=True, num_key_value_heads=None, num_attention_heads=2)),
    "llama_wide_heads": ("f32", False, dict(LLAMA, **old(5000.0), hidden_size=36, head_dim=20, num_attention_heads=3, num_key_value_heads=1)),
    "llama_rope_llama3_old": ("bf16", False, dict(LLAMA, **old(500.0, rope_type="llama3", **LLAMA3))),
    "llama_rope_llama3_new": ("f32", False, dict(LLAMA, **new(500.0, "llama3", **LLAMA3))),
    "llama_rope_linear_old": ("f16", False, dict(
        LLAMA, **old(type="linear", factor=4.0), max_position_embeddings=32)),
    "llama_rope_linear_new": ("bf16", False, dict(
        LLAMA, **new(rope_type="linear", factor=2.5), max_position_embeddings=64)),
    "llama_rope_yarn_new": ("f32", False, dict(
        LLAMA, **new(1000.0, "yarn", **YARN, mscale=1.5, mscale_all_dim=0.7, beta_fast=8.0, beta_slow=0.5, truncate=False))),
    "mistral_window": ("f16", True, dict(MISTRAL, **old(), sliding_window=21, head_dim=16)),
    "mistral_full": ("bf16", False, dict(MISTRAL, **new(1000000.0))),
    "mistral_rope_yarn_factor": ("bf16", False, dict(
        MISTRAL, **new(1000.0, "yarn", **YARN, attention_factor=1.3), max_position_embeddings=128)),
    "qwen2_yarn_old": ("bf16", True, dict(
        QWEN2, **old(1000.0, type="yarn", **YARN), max_position_embeddings=32, tie_word_embeddings=True)),
    "qwen2_window_layers": ("f32", False, dict(
        QWEN2, **old(), use_sliding_window=True, sliding_window=17, max_window_layers=1)),
    "qwen3_norms": ("bf16", True, dict(QWEN3, **new(1000000.0), tie_word_embeddings=True)),
    "qwen3_window_types": ("f32", False, dict(
        QWEN3, **new(), attention_bias=True, use_sliding_window=True, sliding_window=24,
        num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
}


def random_weights(model, generator):
    """Large enough that attention is far from uniform and every tensor affects the logits."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name:
            value = 0.6 * noise
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.2
            value = gain * noise / math.sqrt(parameter.shape[1])
        parameter.data.copy_(value)


def load(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model, prompt, count):
    """Returns the continuation, or None if a step was a near tie."""
    ids = list(prompt)
    for _ in range(count):
        top = torch.topk(logits_of(model, ids)[-1], 2)
        if top.values[0] - top.values[1] < MIN_MARGIN:
            return None
        ids.append(int(top.indices[0]))
    return ids[len(prompt):]


def write_checkpoint(directory, config, dtype, sharded, seed):
    """Writes config.json directly, to keep the old spelling; transformers saves the tensors."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), attn_implementation="eager")
    random_weights(model, torch.Generator().manual_seed(seed))
    model.to(DTYPES[dtype]).save_pretrained(directory, max_shard_size="40KB" if sharded else "1GB")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "generation_config.json").unlink(missing_ok=True)


def write_expected(directory, model, prompt, continuation, row_step, last_rows=3):
    logits = logits_of(model, prompt + continuation)
    end = logits.shape[0]
    rows = sorted(set(range(0, end, row_step)) | set(range(end - last_rows, end)))
    expected = dict(prompt=prompt, greedy=continuation, rows=rows)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")
    save_file({"logits": logits[rows].contiguous()}, directory / "expected.safetensors")


def assert_scaling_matters(directory, config, prompt):
    """Checks that the case would fail if rope scaling or the window were ignored."""
    plain = {k: v for k, v in config.items() if k not in ("rope_scaling", "use_sliding_window")}
    if plain.get("rope_parameters"):
        plain["rope_parameters"] = dict(rope_type="default", rope_theta=plain["rope_parameters"]["rope_theta"])
    if "layer_types" in plain:
        plain["layer_types"] = ["full_attention"] * plain["num_hidden_layers"]
    if plain.get("sliding_window") and plain["model_type"] == "mistral":
        plain["sliding_window"] = None
    if plain == {k: v for k, v in config.items() if not (k == "rope_scaling" and v is None)}:
        return
    path = directory / "config.json"
    saved = path.read_text()
    with_scaling = logits_of(load(directory), prompt)[-1]
    path.write_text(json.dumps(plain))
    without_scaling = logits_of(load(directory), prompt)[-1]
    path.write_text(saved)
    difference = (with_scaling - without_scaling).abs().max()
    assert difference > 1e-2, f"{directory.name}: scaling or window changes logits by {difference} only"


def make_case(name, dtype, sharded, config):
    directory = HERE / name
    for seed in range(100):
        generator = torch.Generator().manual_seed(1000 + seed)
        prompt = torch.randint(0, config["vocab_size"], (PROMPT_LEN,), generator=generator).tolist()
        write_checkpoint(directory, config, dtype, sharded, seed)
        model = load(directory)
        continuation = greedy(model, prompt, GREEDY_LEN)
        if continuation is not None:
            break
    else:
        sys.exit(f"{name}: no seed without a near tie")
    assert_scaling_matters(directory, config, prompt)
    write_expected(directory, model, prompt, continuation, ROW_STEP)
    if name == "qwen3_norms":
        (directory / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[5, 3], pad_token_id=5)) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{name}: seed {seed}, {size // 1024} KB")


DEMO_PROMPTS = {
    "sql": "<|user|>\nList the names of all customers who ordered more than three items.<|end|>\n<|assistant|>\n",
    "code": "<|user|>\nWrite a Python function that adds two numbers.<|end|>\n<|assistant|>\n",
    "chat": "<|user|>\nWhat should I cook tonight?<|end|>\n<|assistant|>\n",
}


def make_demo():
    from tokenizers import Tokenizer

    for role in ("target", "draft"):
        tokenizer = Tokenizer.from_file(str(DEMO / role / "tokenizer.json"))
        model = load(DEMO / role)
        for name, text in DEMO_PROMPTS.items():
            prompt = tokenizer.encode(text).ids
            for count in range(24, 0, -1):
                continuation = greedy(model, prompt, count)
                if continuation is not None:
                    break
            write_expected(HERE / "demo" / f"{role}_{name}", model, prompt, continuation or [], 10**9, last_rows=2)
            print(f"demo {role} {name}: {len(prompt)} + {len(continuation or [])} tokens")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    names = sys.argv[1:]
    for name, (dtype, sharded, config) in CASES.items():
        if not names or name in names:
            make_case(name, dtype, sharded, config)
    if not names or "demo" in names:
        make_demo()
