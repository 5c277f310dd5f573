"""Reads, checks and splits rows of {task, prompt, completion}, and encodes each split as one stream of ids."""

import collections
import dataclasses
import hashlib
import json
import os
import random
import shutil
import sys
from urllib.parse import quote, unquote

import numpy as np

import text

# Without --valid, one in this many rows is used for validation instead of training.
HOLD_OUT_EVERY = 50
# Documents per call of the tokenizer, which works on a call's documents in parallel.
ENCODE_BATCH = 2000


class Rows:
    """The rows of a run, split into training and validation."""

    def __init__(self, data, valid, exclude_licences):
        self.exclude_licences = exclude_licences
        self.excluded = 0
        rows = list(self._read(data))
        if valid is not None:
            self._train, self._valid = rows, list(self._read(valid))
        else:
            self._train = [row for row in rows if not held_out(row)]
            self._valid = [row for row in rows if held_out(row)]
        if not self._train or not self._valid:
            sys.exit(f"{len(self._train)} rows to train on and {len(self._valid)} to validate on in {data}: both are needed")

    def train(self):
        return iter(self._train)

    def valid(self):
        return iter(self._valid)

    def summary(self):
        """The data of a model card."""
        licences = collections.Counter(row.get("licence", "not stated") for row in self._train)
        tasks = collections.Counter(row["task"] for row in self._train)
        sources = sorted({row["source"] for row in self._train if "source" in row})
        return {
            "train": len(self._train), "valid": len(self._valid), "excluded": self.excluded,
            "tasks": dict(tasks), "licences": dict(licences), "sources": sources,
        }

    def _read(self, directory):
        files = sorted(directory.rglob("*.jsonl"))
        if not files:
            sys.exit(f"no .jsonl files in {directory}")
        for file in files:
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.strip():
                        continue
                    row = parse(line, f"{file}:{number}")
                    if any(part in row.get("licence", "") for part in self.exclude_licences):
                        self.excluded += 1
                    else:
                        yield row


def parse(line, location):
    try:
        row = json.loads(line)
    except ValueError as error:
        sys.exit(f"{location}: not JSON: {error}")
    for field in ("task", "prompt", "completion"):
        if not isinstance(row, dict) or not is_text(row.get(field)):
            sys.exit(f"{location}: needs a text field `{field}`")
    # Optional fields may be null.
    return {field: value for field, value in row.items() if value is not None}


def is_text(value):
    """JSON can escape halves of UTF-16 pairs, which no text has."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def held_out(row):
    """Decided by the prompt's hash, so that a row stays in its split when others are added or removed."""
    digest = hashlib.sha256(row["prompt"].encode()).digest()
    return int.from_bytes(digest[:4], "little") % HOLD_OUT_EVERY == 0


@dataclasses.dataclass
class Encoded:
    """Ids of whole documents in shuffled order. `valid` has a stream per task."""

    train: np.ndarray
    valid: dict


def load_or_encode(directory, rows, tokenizer, seed):
    if not directory.exists():
        # Written to a temporary directory first, so that an interrupted run leaves no partial result.
        temporary = directory.with_suffix(".new")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        np.save(temporary / "train.npy", encode(rows.train(), tokenizer, seed, "training"))
        by_task = collections.defaultdict(list)
        for row in rows.valid():
            by_task[row["task"]].append(row)
        for task, task_rows in sorted(by_task.items()):
            np.save(temporary / f"valid-{quote(task, safe=' ')}.npy", encode(task_rows, tokenizer, seed, f"validation {task}"))
        os.replace(temporary, directory)
    valid = {unquote(file.stem.removeprefix("valid-")): np.load(file) for file in sorted(directory.glob("valid-*.npy"))}
    return Encoded(train=np.load(directory / "train.npy", mmap_mode="r"), valid=valid)


def encode(rows, tokenizer, seed, what):
    documents = [text.document(row) for row in rows]
    random.Random(seed).shuffle(documents)
    id_dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    parts = []
    for start in range(0, len(documents), ENCODE_BATCH):
        batch = tokenizer.encode_batch(documents[start : start + ENCODE_BATCH], add_special_tokens=False)
        parts.extend(np.array(encoding.ids, dtype=id_dtype) for encoding in batch)
    ids = np.concatenate(parts)
    print(f"encoding: {what}: {len(documents):,} documents, {len(ids):,} tokens")
    return ids


def write_atomically(path, data):
    """Replaces the file atomically: a reader sees the old or the new content, even if the run is interrupted."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
