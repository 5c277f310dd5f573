"""A stand-in for vLLM with the calls that deploy/gpu-peer-vllm.py makes, on a clock of its own: a step takes one
millisecond, and 0.01 for each row that it computes. KV has 64 blocks of 16 tokens."""

import json
import pathlib
import time
import types

__version__ = "0.0"
clock = 0.0
time.perf_counter = lambda: clock


class SamplingParams(types.SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, max_model_len, max_num_seqs, max_num_batched_tokens, speculative_config, **options):
        config = json.loads(pathlib.Path(model, "config.json").read_text())
        assert config["max_position_embeddings"] >= max_model_len
        assert options["load_format"] == "dummy" and options["skip_tokenizer_init"]
        self.drafted = speculative_config["num_speculative_tokens"] if speculative_config else 0
        self.max_model_len, self.max_num_seqs, self.max_rows = max_model_len, max_num_seqs, max_num_batched_tokens
        self.cached, self.drafts = set(), 0
        cache = types.SimpleNamespace(block_size=16, num_gpu_blocks=64)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))

    def generate(self, prompts, sampling, use_tqdm):
        assert len(prompts) <= self.max_num_seqs
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        assert all(len(prompt) + sampling.max_tokens <= self.max_model_len for prompt in ids)
        rows = sum(self.rows_to_compute(prompt) for prompt in ids)
        while rows > 0:
            self.step(min(rows, self.max_rows))
            rows -= self.max_rows
        left = sampling.max_tokens - 1
        while left > 0:
            self.step(len(ids) * (1 + self.drafted))
            self.drafts += len(ids) if self.drafted else 0
            # Guesses are right if only the repeated id may be drawn.
            left -= 1 + self.drafted if sampling.allowed_token_ids else 1
        output = types.SimpleNamespace(token_ids=[0] * sampling.max_tokens)
        return [types.SimpleNamespace(outputs=[output]) for _ in ids]

    def rows_to_compute(self, prompt):
        """Rows past the longest cached prefix of whole blocks; at least one."""
        blocks = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        cached = max((len(block) for block in blocks if block in self.cached), default=0)
        self.cached.update(blocks)
        return max(len(prompt) - cached, 1)

    def step(self, rows):
        global clock
        clock += 1e-3 + 1e-5 * rows

    def get_metrics(self):
        return [types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts)]
