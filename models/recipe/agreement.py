"""Agreement of draft and target on validation text, the quantity that training a pair aims at."""

import numpy as np
import torch

# Windows per task type, and draws of shared noise per position; enough for two significant digits.
WINDOWS = 2
DRAWS = 16


@torch.no_grad()
def measure(target, draft, encoded, context, seed):
    """Per task type: the share of positions at which both models pick the same token, greedily and by coupled draws at T = 1
    (the same Gumbel noise for both), and the overlap of the two distributions, the upper bound for any way of drawing."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = target.to("cpu").float().eval(), draft.to("cpu").float().eval()
    rates = {}
    for task, ids in encoded.valid.items():
        count = min(WINDOWS, len(ids) // context)
        if count == 0:
            continue
        batch = torch.from_numpy(ids[: count * context].astype(np.int64)).view(count, context)
        p = torch.log_softmax(target(input_ids=batch).logits, -1)
        q = torch.log_softmax(draft(input_ids=batch).logits, -1)
        rates[task] = {
            "greedy": share_equal(p, q),
            "coupled": float(np.mean([coupled_draw(p, q, generator) for _ in range(DRAWS)])),
            "overlap": torch.minimum(p.exp(), q.exp()).sum(-1).mean().item(),
        }
    return rates


def share_equal(p, q):
    return (p.argmax(-1) == q.argmax(-1)).float().mean().item()


def coupled_draw(p, q, generator):
    # Strictly inside (0, 1), so that both logarithms are finite.
    uniform = torch.rand(p.shape, generator=generator).clamp(1e-10, 1.0 - 1e-7)
    noise = -torch.log(-torch.log(uniform))
    return share_equal(p + noise, q + noise)
