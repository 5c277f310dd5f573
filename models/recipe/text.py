"""Text to ids: the chat template and the byte-level BPE tokenizer that both models of a pair share."""

import random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import corpus

END, USER, ASSISTANT, SYSTEM = SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# A sample is enough: merges are stable long before a whole corpus is counted.
SAMPLE_CHARACTERS = 40_000_000


def document(row):
    """One row as the chat template renders it, with both turns ended. Prompts of a router's log are already rendered."""
    if row.get("framed"):
        return f"{row['prompt']}{row['completion']}{END}\n"
    return f"{USER}\n{row['prompt']}{END}\n{ASSISTANT}\n{row['completion']}{END}\n"


def load_or_train(path, rows, vocab, seed):
    if path.exists():
        return tokenizers.Tokenizer.from_file(str(path))
    print(f"tokenizer: training {vocab} entries")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Each digit is a separate token, so that merges do not hide the digits of numbers.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(rows, seed), trainer)
    corpus.write_atomically(path, tokenizer.to_str(pretty=True).encode())
    return tokenizer


def sample(rows, seed):
    order = list(rows.train())
    random.Random(seed).shuffle(order)
    characters = 0
    for row in order:
        yield row["prompt"]
        yield row["completion"]
        characters += len(row["prompt"]) + len(row["completion"])
        if characters > SAMPLE_CHARACTERS:
            return
