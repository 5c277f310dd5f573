#!/usr/bin/env python3
"""Measure steps of a model with random weights with vLLM, for comparison with the roofline section of gpu_check.

    gpu-peer-vllm.py CONFIG --contexts 128 8192 --prompt 2048               one row, and a prompt
    gpu-peer-vllm.py CONFIG --contexts 128 8192 --rows 5 --sequences 8 32   verify steps

CONFIG is a model's config.json; no weights are read. Requires vllm. Prints one line for each step:
milliseconds of the step, the host's part included. Verify steps draft by lookup (method ngram) in a text of one
repeated id, and only that id may be drawn, so that every step has all its rows and every guess is right.
"""

import argparse
import json
import pathlib
import tempfile
import time

import vllm

RUNS = 5
# Steps between the two times that are subtracted.
STEPS = 24
REPEATED_ID = 7


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--contexts", type=int, nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, help="rows of a prompt")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        llm = load(folder, args)
    for context in args.contexts:
        for sequences in args.sequences:
            name = f"{sequences} x {args.rows} rows behind {context}"
            report(name, fits(llm, sequences, context, args), lambda: step_ms(llm, sequences, context, args.rows))
        if args.prompt:
            name = f"prompt of {args.prompt} rows behind {context}"
            report(name, fits(llm, 1, context, args), lambda: prompt_ms(llm, context, args.prompt))


def load(folder, args):
    drafted = args.rows - 1
    max_len = longest(max(args.contexts), args)
    # Random weights do not depend on positions, so a longer limit is valid.
    config = json.loads(pathlib.Path(args.config).read_text()) | {"max_position_embeddings": max_len}
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    return vllm.LLM(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=max_len,
        max_num_seqs=max(args.sequences),
        # A prompt is one step.
        max_num_batched_tokens=max(args.prompt or 0, 2048) + 64,
        gpu_memory_utilization=args.memory,
        disable_log_stats=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": drafted,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
        if drafted
        else None,
    )


def longest(context, args):
    """Length of the longest sequence behind `context`: its prompt, or the ids of all steps."""
    return context + max(args.prompt or 0, args.rows * (STEPS + 2)) + 16


def fits(llm, sequences, context, args):
    cache = llm.llm_engine.vllm_config.cache_config
    blocks_of_each = -(-longest(context, args) // cache.block_size)
    return sequences * blocks_of_each <= cache.num_gpu_blocks


def report(name, fits, measure):
    said = f"{measure():.3f} ms" if fits else "NOT RUN, kv has no room for it"
    print(f"vllm {vllm.__version__}, bf16: {name}: {said}", flush=True)


def step_ms(llm, sequences, context, rows):
    """Milliseconds of a step: of many steps, less those of the first token, by the number of steps."""
    prompts = [{"prompt_token_ids": [REPEATED_ID] * context} for _ in range(sequences)]
    first, _ = timed(llm, prompts, 1, rows)
    all_steps, drafts = timed(llm, prompts, 1 + STEPS * rows, rows)
    # Each step has one draft for each sequence. Without drafts, a step gives one token.
    steps = drafts / sequences if rows > 1 else STEPS
    if steps < STEPS * 0.9:
        raise SystemExit(f"only {steps:.1f} of {STEPS} steps had a draft")
    return (all_steps - first) * 1e3 / steps


def prompt_ms(llm, context, rows):
    """Milliseconds until the first token of a prompt whose first `context` ids are cached."""
    cached = [REPEATED_ID] * context
    timed(llm, [{"prompt_token_ids": cached + [1]}], 1, 1)
    best = float("inf")
    for run in range(RUNS + 1):  # the first run is a warm-up
        # Ids that no run before has cached.
        ids = [8 + (run * rows + i) % 1000 for i in range(rows)]
        ids[0] = 2000 + run
        seconds, _ = timed_once(llm, [{"prompt_token_ids": cached + ids}], parameters(1, 1))
        best = min(best, seconds) if run > 0 else best
    return best * 1e3


def parameters(tokens, rows):
    return vllm.SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=[REPEATED_ID] if rows > 1 else None,
    )


def timed(llm, prompts, tokens, rows):
    """Seconds of the fastest of RUNS runs, and the number of drafts of one run."""
    sampling = parameters(tokens, rows)
    timed_once(llm, prompts, sampling)  # a warm-up, which also caches the prompts
    return min(timed_once(llm, prompts, sampling) for _ in range(RUNS))


def timed_once(llm, prompts, sampling):
    before = num_drafts(llm)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output in outputs:
        assert len(output.outputs[0].token_ids) == sampling.max_tokens
    return seconds, num_drafts(llm) - before


def num_drafts(llm):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_drafts")


if __name__ == "__main__":
    main()
