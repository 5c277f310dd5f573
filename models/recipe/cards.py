"""The result of a run: two Hugging Face checkpoints, each with a model card."""

import dataclasses
import json
import os
import shutil

import torch

import text
from shapes import POSITIONS


@dataclasses.dataclass
class CardData:
    """The data of both cards."""

    settings: object
    rows: dict
    tokens: int
    rates: dict

    def card(self, role, model, losses):
        settings = self.settings
        parameters = sum(weight.numel() for weight in model.parameters())
        budget = settings.target_tokens if role == "target" else settings.draft_tokens
        objective = "cross entropy"
        if role == "draft":
            objective = f"{settings.kl_weight:g} KL to the target + {1 - settings.kl_weight:g} cross entropy"
        lines = [
            f"# {role.capitalize()} of a pair ({settings.size})",
            "",
            f"- {parameters:,} parameters, Llama, bf16, tied embeddings, tokenizer of {settings.vocab:,} entries shared by the pair",
            f"- trained by `models/recipe/make_pair.py` on {budget:,.0f} tokens (the corpus has {self.tokens:,}); {objective}; seed {settings.seed}",
            f"- validation loss {sum(losses.values()) / len(losses):.3f} nats per token, mean over task types",
            "",
            "| task type | validation loss | greedy agreement | coupled agreement, T = 1 | overlap, T = 1 |",
            "|---|---|---|---|---|",
        ]
        for task, loss in losses.items():
            rate = self.rates.get(task)
            numbers = "| | |" if rate is None else f"{rate['greedy']:.3f} | {rate['coupled']:.3f} | {rate['overlap']:.3f} |"
            lines.append(f"| {task} | {loss:.3f} | {numbers}")
        lines += [
            "",
            "Agreement is between target and draft, teacher-forced on validation text, not on the target's own text.",
            "",
            "## Data",
            "",
            f"{self.rows['train']:,} training rows, {self.rows['valid']:,} validation rows, {self.rows['excluded']:,} rows excluded by licence.",
            "",
            *(f"- {licence}: {count:,} rows" for licence, count in sorted(self.rows["licences"].items())),
            "",
            "Sources: " + ("; ".join(self.rows["sources"]) or "not stated in the rows"),
            "",
        ]
        return "\n".join(lines)


def write_checkpoint(directory, model, tokenizer, card):
    """Write the checkpoint to a temporary directory, then move it to its place in one step."""
    temporary = directory.with_name(directory.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    model.to("cpu").to(torch.bfloat16).save_pretrained(temporary)
    (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (temporary / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2))
    (temporary / "chat_template.jinja").write_text(text.CHAT_TEMPLATE)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.END,
        "pad_token": text.END,
        "additional_special_tokens": [text.USER, text.ASSISTANT, text.SYSTEM],
        "model_max_length": POSITIONS,
    }
