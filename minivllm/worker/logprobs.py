"""Log-probabilities of tokens, as the model gave them: before penalties, temperature and filters.

Mirrors `gather_logprobs` in `vllm/v1/sample/sampler.py` and `LogprobsTensors` in `vllm/v1/outputs.py`.
"""

from __future__ import annotations

from torch import Tensor

from minivllm.outputs import Logprob
from minivllm.worker.transfer import HostCopy, to_device


def top_logprobs(logits: Tensor, token_ids: list[int], num_logprobs: int) -> list[dict[int, Logprob]]:
    """For each row, the log-probabilities of the `num_logprobs` most likely tokens and of `token_ids[row]`.

    Args:
        logits: `[rows, vocab_size]`, as the model gave them.
        token_ids: The token that was chosen, or that stands in the prompt, for each row.
        num_logprobs: How many of the most likely ones.
    """
    return launch_logprobs(logits, to_device(token_ids, logits.device), num_logprobs).entries(token_ids)


def launch_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> LogprobTensors:
    """`top_logprobs`, of tokens on the device, without waiting for it."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    return LogprobTensors(chosen.squeeze(1), ranks, *logprobs.topk(min(num_logprobs, logprobs.shape[-1]), dim=-1))


class LogprobTensors(HostCopy):
    """Log-probabilities on their way to the host: those of chosen tokens, their ranks, the highest, and their tokens."""

    def entries(self, token_ids: list[int]) -> list[dict[int, Logprob]]:
        """What `top_logprobs` returns, given the chosen tokens."""
        result = []
        columns = (tensor.tolist() for tensor in self.wait())
        for token_id, value, rank, top_values, top_ids in zip(token_ids, *columns, strict=True):
            entry = {token_id: Logprob(value, rank)}
            for position, (top_value, top_id) in enumerate(zip(top_values, top_ids, strict=True)):
                entry.setdefault(top_id, Logprob(top_value, position + 1))
            result.append(entry)
        return result
