"""The shapes of a pair. All are Llama models with tied embeddings, so that any Llama loader serves them."""

import dataclasses

import torch
import transformers


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int


@dataclasses.dataclass(frozen=True)
class Pair:
    target: Shape
    draft: Shape


PAIRS = {
    # Takes minutes on a laptop core; for trials of the recipe.
    "tiny": Pair(Shape(64, 2, 4, 2, 176), Shape(32, 1, 2, 1, 88)),
    # The shapes of the bundled pair; takes hours on two CPU cores.
    "demo": Pair(Shape(256, 6, 8, 4, 704), Shape(128, 2, 4, 2, 352)),
    # For a GPU and a larger corpus.
    "small": Pair(Shape(768, 12, 12, 4, 2048), Shape(256, 3, 4, 2, 704)),
}

POSITIONS = 2048


def build_model(shape, tokenizer, seed):
    """A freshly initialised model; `seed` decides its weights."""
    torch.manual_seed(seed)
    end = tokenizer.token_to_id("<|end|>")
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return transformers.LlamaForCausalLM(config)
