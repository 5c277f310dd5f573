#!/usr/bin/env python3
"""Make a target and a draft checkpoint with one tokenizer from JSONL files of {task, prompt, completion}.

    python models/recipe/make_pair.py --data DIR --out DIR [--size demo] [--device cpu|cuda]

Stages: tokenizer, encoding, target, draft, agreement, cards. A stage whose result exists is skipped. The command may be interrupted
at any time; the same command resumes the run.
"""

import argparse
import json
import pathlib
import sys

import torch

import agreement
import cards
import corpus
import text
import training
from shapes import PAIRS, build_model


def main():
    settings = parse_arguments()
    out = settings.out
    out.mkdir(parents=True, exist_ok=True)
    check_settings(out / "settings.json", settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)

    rows = corpus.Rows(settings.data, settings.valid, settings.exclude_licence)
    tokenizer = text.load_or_train(out / "tokenizer.json", rows, settings.vocab, settings.seed)
    encoded = corpus.load_or_encode(out / "encoded", rows, tokenizer, settings.seed)

    pair = PAIRS[settings.size]
    plan = training.Plan(
        batch=settings.batch, context=settings.context, seed=settings.seed, device=settings.device,
        bf16=settings.bf16, save_seconds=settings.save_seconds,
    )
    target = build_model(pair.target, tokenizer, seed=settings.seed)
    target_loss = training.train(
        training.Job("target", target, settings.target_tokens, settings.target_rate, teacher=None, kl_weight=0.0),
        plan, encoded, out / "work",
    )
    draft = build_model(pair.draft, tokenizer, seed=settings.seed + 1)
    draft_loss = training.train(
        training.Job("draft", draft, settings.draft_tokens, settings.draft_rate, teacher=target, kl_weight=settings.kl_weight),
        plan, encoded, out / "work",
    )

    rates = agreement.measure(target, draft, encoded, settings.context, settings.seed)
    card_data = cards.CardData(settings=settings, rows=rows.summary(), tokens=len(encoded.train), rates=rates)
    cards.write_checkpoint(out / "target", target, tokenizer, card_data.card("target", target, target_loss))
    cards.write_checkpoint(out / "draft", draft, tokenizer, card_data.card("draft", draft, draft_loss))
    print(f"done: {out / 'target'} and {out / 'draft'}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=pathlib.Path, required=True, help="directory of .jsonl files to train on")
    add("--valid", type=pathlib.Path, help="directory of .jsonl files to validate on (default: every 50th row of --data, by hash)")
    add("--out", type=pathlib.Path, required=True, help="directory for the pair and the checkpoints of unfinished runs")
    add("--size", choices=sorted(PAIRS), default="demo", help="shapes of the pair (default: demo)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="device to train on (default: cuda if there is a GPU)")
    add("--threads", type=int, help="CPU threads (default: torch's own choice)")
    add("--bf16", action=argparse.BooleanOptionalAction, default=None, help="compute in bf16 (default: on a GPU only)")
    add("--exclude-licence", action="append", default=[], metavar="TEXT", help="exclude rows whose `licence` contains this")
    add("--vocab", type=int, default=4096, help="entries of the tokenizer (default: 4096)")
    add("--target-tokens", type=float, default=18e6, help="tokens that the target is trained on (default: 18e6)")
    add("--draft-tokens", type=float, default=8e6, help="tokens that the draft is trained on (default: 8e6)")
    add("--target-rate", type=float, default=2e-3, help="peak learning rate of the target (default: 2e-3)")
    add("--draft-rate", type=float, default=3e-3, help="peak learning rate of the draft (default: 3e-3)")
    add("--kl-weight", type=float, default=0.8, help="share of the draft's loss that is KL to the target; the rest is cross entropy (default: 0.8)")
    add("--batch", type=int, default=16, help="windows per step (default: 16)")
    add("--context", type=int, default=256, help="tokens per window (default: 256)")
    add("--seed", type=int, default=0, help="seed of weights, tokenizer sample and order of windows (default: 0)")
    add("--save-seconds", type=float, default=120, help="interval of checkpoints of unfinished runs, in seconds (default: 120)")
    settings = parser.parse_args()
    if settings.bf16 is None:
        settings.bf16 = settings.device == "cuda"
    if not 0.0 <= settings.kl_weight <= 1.0:
        parser.error("--kl-weight lies between 0 and 1")
    return settings


def check_settings(path, settings):
    """Refuses to resume a run with other settings than it was started with, which would mix two recipes in one model."""
    changeable = {"out", "device", "threads", "save_seconds"}
    fixed = {name: jsonable(value) for name, value in vars(settings).items() if name not in changeable}
    if path.exists():
        before = json.loads(path.read_text())
        changed = [f"{name}: {before.get(name)!r} before, {fixed.get(name)!r} now" for name in fixed if before.get(name) != fixed[name]]
        if changed:
            sys.exit(f"{path.parent} was started with other settings ({'; '.join(changed)}): give another --out, or the same settings")
        return
    corpus.write_atomically(path, json.dumps(fixed, indent=2).encode())


def jsonable(value):
    return str(value) if isinstance(value, pathlib.Path) else value


if __name__ == "__main__":
    try:
        main()
    except training.Interrupted as end:
        sys.exit(f"{end}; run the same command to continue")
    except KeyboardInterrupt:
        sys.exit("interrupted between training runs; run the same command to continue")
