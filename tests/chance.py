"""What chance allows: counts against exact probabilities, and those of a tiny model's texts.

Tests fix their seeds, so each chi-square passes or fails for good; LIKELY is far below what a right
rule gives, UNLIKELY is what a wrong one must show.
"""

from __future__ import annotations

from itertools import product

import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

LIKELY, UNLIKELY = 1e-3, 1e-9
# Changes to a model of `tests.models` that leave it a vocabulary of 4 without special tokens.
SMALL = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def likelihood(counts, probabilities) -> float:
    """Chi-square p-value of counts by outcome; outcomes expected under 5 times are one cell."""
    total = sum(counts.values())
    impossible = [x for x, n in counts.items() if n and probabilities.get(x, 0) == 0]
    assert not impossible, f"outcomes of probability 0: {impossible[:5]}"
    cells = [(counts.get(x, 0), total * p) for x, p in probabilities.items() if p > 0]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append(tuple(map(sum, zip(*rare, strict=True))))
    if len(cells) < 2:
        return 1.0
    observed, expected = zip(*cells, strict=True)
    scale = sum(observed) / sum(expected)
    return chisquare(observed, [scale * x for x in expected]).pvalue


def warp(logits, sampling):
    """Hugging Face's warpers, in the order `generate` applies them."""
    logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    return TopPLogitsWarper(sampling.top_p)(None, logits) if sampling.top_p < 1 else logits


def exact_joint(model, prompt, length, sampling) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, by Hugging Face's forward and warpers."""
    texts = list(product(range(model.config.vocab_size), repeat=length))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits
    start = len(prompt) - 1
    steps = [warp(logits[:, start + i].double(), sampling).softmax(-1) for i in range(length)]
    rows = range(len(texts))
    chosen = [
        step[rows, ids] for step, ids in zip(steps, torch.tensor(texts).T.tolist(), strict=True)
    ]
    return dict(zip(texts, torch.stack(chosen).prod(0).tolist(), strict=True))
