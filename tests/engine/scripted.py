"""A model whose logits a test writes."""

import torch


def script_logits(llm, row):
    """Replaces the model's logits: row(number of tokens before the one to draw, request) -> logits."""
    runner_step = llm.runner.step

    def step(batch):
        requests = [request for request in batch if request.samples]
        llm.runner.model.logits = lambda hidden: torch.stack([row(len(r.tokens), r) for r in requests])
        return runner_step(batch)

    llm.runner.step = step


def one_hot(token, size=288):
    logits = torch.zeros(size)
    logits[token] = 50.0
    return logits
