"""The training run of one model: windows, loss, schedule, progress, checkpoints.

The windows of a step depend only on (seed, model, step), and nothing else in a step is random. So a run that was interrupted and
resumed takes the same steps as an uninterrupted one.
"""

import contextlib
import dataclasses
import io
import math
import pathlib
import signal
import time

import numpy as np
import torch
import transformers

from corpus import write_atomically

WARMUP_STEPS = 100
# The learning rate ends at this share of its peak.
FINAL_SHARE = 0.05
WEIGHT_DECAY = 0.05
GRADIENT_NORM_MAX = 1.0
PROGRESS_SECONDS = 10
# Validation windows per task.
VALID_WINDOWS = 8


class Interrupted(Exception):
    """The run was stopped by a signal, and its state is saved."""


@dataclasses.dataclass
class Plan:
    """Settings that the runs of a pair share."""

    batch: int
    context: int
    seed: int
    device: str
    bf16: bool
    save_seconds: float

    def autocast(self):
        return torch.autocast(self.device, dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext()


@dataclasses.dataclass
class Job:
    """One model to train. With a teacher it is distilled."""

    name: str
    model: transformers.PreTrainedModel
    tokens: float
    peak_rate: float
    teacher: transformers.PreTrainedModel | None
    kl_weight: float


def train(job, plan, encoded, work):
    """Train `job.model` in place and return its validation loss per task."""
    work.mkdir(parents=True, exist_ok=True)
    steps = max(1, int(job.tokens) // (plan.batch * plan.context))
    job.model.to(plan.device).train()
    if job.teacher is not None:
        job.teacher.to(plan.device).eval().requires_grad_(False)
    optimizer = make_optimizer(job)
    saved = work / f"{job.name}.pt"
    first = restore(saved, job.model, optimizer, plan.device)
    progress = Progress(job, plan, first, steps)
    with StopRequest() as stop:
        last_save = time.monotonic()
        for step in range(first, steps):
            set_rate(optimizer, job.peak_rate * schedule(step, steps))
            loss = training_step(job, plan, optimizer, windows(encoded.train, plan, job.name, step))
            progress.report(step + 1, loss)
            is_save_due = time.monotonic() - last_save > plan.save_seconds
            if is_save_due or stop.requested or step + 1 == steps:
                save(saved, job.model, optimizer, step + 1)
                last_save = time.monotonic()
            if stop.requested:
                raise Interrupted(f"{job.name}: stopped and saved after step {step + 1} of {steps}")
    job.model.eval()
    losses = validate(job.model, plan, encoded.valid)
    mean = sum(losses.values()) / len(losses)
    print(f"{job.name}: {steps:,} steps done, validation loss {mean:.3f} (mean over {len(losses)} task types)")
    return losses


def training_step(job, plan, optimizer, ids):
    ids = ids.to(plan.device)
    with plan.autocast():
        logits = job.model(input_ids=ids).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        if job.teacher is not None:
            with torch.no_grad():
                teacher_logits = job.teacher(input_ids=ids).logits[:, :-1].float()
            loss = job.kl_weight * kl_to_teacher(teacher_logits, logits) + (1.0 - job.kl_weight) * loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), GRADIENT_NORM_MAX)
    optimizer.step()
    return loss.detach()


def kl_to_teacher(teacher_logits, logits):
    """KL(target || draft) per position, averaged: the draft must match the whole distribution to be accepted at any temperature near 1."""
    teacher = torch.log_softmax(teacher_logits, -1)
    return (teacher.exp() * (teacher - torch.log_softmax(logits, -1))).sum(-1).mean()


def windows(ids, plan, name, step):
    """`batch` windows of `context` ids (batch, context), from positions that depend on (seed, model, step)."""
    key = [plan.seed, int.from_bytes(name.encode(), "little"), step]
    last_start = len(ids) - plan.context
    if last_start < 1:
        raise SystemExit(f"{len(ids)} training tokens are fewer than one window of {plan.context}: give more data or a smaller --context")
    starts = np.random.default_rng(key).integers(0, last_start, plan.batch)
    return torch.from_numpy(np.stack([ids[start : start + plan.context] for start in starts]).astype(np.int64))


def make_optimizer(job):
    matrices = [weight for weight in job.model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in job.model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.peak_rate, betas=(0.9, 0.95))


def schedule(step, steps):
    """Linear warm-up, then half a cosine down to FINAL_SHARE, as a share of the peak rate."""
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, steps // 10)))
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return warmup * (FINAL_SHARE + (1.0 - FINAL_SHARE) * cosine)


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def validate(model, plan, valid):
    """Cross entropy per token and task type, over the first windows of each."""
    losses = {}
    for task, ids in valid.items():
        count = min(VALID_WINDOWS, len(ids) // plan.context)
        if count == 0:
            continue
        batch = torch.from_numpy(ids[: count * plan.context].astype(np.int64)).view(count, plan.context).to(plan.device)
        with plan.autocast():
            logits = model(input_ids=batch).logits[:, :-1].float()
        losses[task] = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    if not losses:
        raise SystemExit(f"no task type has {plan.context} validation tokens: give more rows or a smaller --context")
    return losses


def save(path, model, optimizer, step):
    buffer = io.BytesIO()
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, buffer)
    write_atomically(path, buffer.getbuffer())


def restore(path, model, optimizer, device):
    """Load the saved state, and return the first step to run."""
    if not pathlib.Path(path).exists():
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    return state["step"]


class Progress:
    """Prints a line at intervals: steps done, loss, tokens per second, remaining time."""

    def __init__(self, job, plan, first, steps):
        self.name, self.first, self.steps = job.name, first, steps
        self.tokens_per_step = plan.batch * plan.context
        self.start = self.last_report = time.monotonic()
        parameters = sum(weight.numel() for weight in job.model.parameters())
        state = "finished" if first == steps else f"from step {first:,}" if first else "from the start"
        print(f"{self.name}: {parameters:,} parameters, {steps:,} steps, {state}", flush=True)

    def report(self, done, loss):
        now = time.monotonic()
        if now - self.last_report < PROGRESS_SECONDS and done != self.steps:
            return
        self.last_report = now
        seconds_per_step = (now - self.start) / (done - self.first)
        remaining = seconds_per_step * (self.steps - done)
        rate = self.tokens_per_step / seconds_per_step
        print(
            f"{self.name}: step {done:,}/{self.steps:,} ({100 * done / self.steps:.1f}%), loss {loss.item():.3f}, "
            f"{rate:,.0f} tokens/s, {clock(remaining)} remaining",
            flush=True,
        )


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class StopRequest:
    """Records the first Ctrl-C or SIGTERM for the training loop; a second one ends the process as usual."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self):
        self.requested = False
        self.previous_handlers = {number: signal.signal(number, self._record) for number in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number, _frame):
        self.requested = True
        signal.signal(number, self.previous_handlers[number])
