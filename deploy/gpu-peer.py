#!/usr/bin/env python3
"""Measure greedy decoding of the pair with transformers, for comparison with the results of gpu_check: the
target alone, and with the draft as its assistant_model, on one device.

    gpu-peer.py TARGET DRAFT --tokens 200 --drafted 4 [--prompt 100] [--device cuda:0]

Requires torch and transformers. Prints one line for each of the two, then whether the two outputs are equal or
the index of the first id that differs. Rounding of floats may cause differences.
"""

import argparse
import time

import torch
import transformers
from transformers import AutoModelForCausalLM

RUNS = 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--drafted", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()

    target, draft = (load(folder, args.device) for folder in (args.target, args.draft))
    # Request the same number of ids in every round, as Outrider does.
    draft.generation_config.num_assistant_tokens = args.drafted
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    vocab = min(target.config.vocab_size, draft.config.vocab_size)
    prompt = torch.tensor([[(i * i * 31 + i * 7 + 11) % vocab for i in range(args.prompt)]], device=args.device)

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, bf16"
    target_ids, target_ms = measure(target, prompt, args, None)
    print(f"{versions}: {args.tokens} ids, target alone: {target_ms:.3f} ms per id")
    assisted_ids, assisted_ms = measure(target, prompt, args, draft)
    print(f"{versions}: with assistant_model, {args.drafted} drafted per round: {assisted_ms:.3f} ms per id, {target_ms / assisted_ms:.2f} times as fast")
    first_difference = next((i for i, (a, b) in enumerate(zip(target_ids, assisted_ids)) if a != b), None)
    print("both outputs are equal" if first_difference is None else f"the outputs differ from id {first_difference} on")


def load(folder, device):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    # No EOS, so that all runs have the same length.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def measure(target, prompt, args, assistant):
    """Returns the generated ids, and the milliseconds per id of the fastest run."""
    best = float("inf")
    for _ in range(RUNS + 1):  # the first run is a warm-up
        synchronize(args.device)
        start = time.perf_counter()
        with torch.inference_mode():
            ids = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=args.tokens,
                min_new_tokens=args.tokens,
                do_sample=False,
                assistant_model=assistant,
            )
        synchronize(args.device)
        best = min(best, time.perf_counter() - start)
    generated = ids[0, prompt.shape[1] :].tolist()
    return generated, best * 1e3 / len(generated)


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
