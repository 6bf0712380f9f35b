"""Runs the model for one step: lays the tokens out as a ragged batch, runs the model, samples.

There is one code path for prefill, decode and mixed steps: each sequence brings the tokens to compute, one or many. Mirrors `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.distributed.pipeline import IntermediateTensors
from minivllm.errors import KernelError
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.models.base import CausalLM
from minivllm.outputs import Logprob
from minivllm.request import EngineCoreRequest
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_output import PLACEHOLDER, Masks, SequenceData, SequenceOutput, apply_masks
from minivllm.worker.choice_in_parts import can_choose_in_parts, choose_in_part
from minivllm.worker.cuda_graphs import StepGraphs
from minivllm.worker.logprobs import top_logprobs
from minivllm.worker.model_input import BlockTables, ModelInput
from minivllm.worker.sampler import PendingTokens, SampledToken, Sampler, SamplingRow
from minivllm.worker.stage import PipelineStage
from minivllm.worker.transfer import RecentTokens, pack_to_device, to_device

PROMPT_LOGPROB_ROWS = 256
"""Rows of prompt logits computed at a time: the logits of a long prompt at once would take gigabytes."""


class ForwardPass(NamedTuple):
    """A step between `launch_model` and `sample_tokens`.

    Attributes:
        sequences: What was computed.
        hidden: `[num_tokens, hidden_size]`.
        sampled_rows: Those of `hidden` to sample from.
        logits: Of all rows, if a CUDA graph has computed them.
    """

    sequences: list[SequenceData]
    hidden: Tensor
    sampled_rows: list[int]
    logits: Tensor | None = None


class ModelRunner:
    """Turns scheduled sequences into new tokens, with a model of `minivllm.models` that has its weights.

    Attributes:
        stage: Its place in a pipeline of several model runners, each with some of the layers; None if this one has all of them.
        recent_tokens: What placeholders in the input stand for. None if a step is launched only when all tokens before it are known.
    """

    stage: PipelineStage | None = None
    recent_tokens: RecentTokens | None = None

    def __init__(
        self, model: CausalLM, block_size: int, max_model_len: int, device: torch.device, sampler: Sampler | None = None
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = device
        self.sampler = sampler or Sampler()
        self.graphs: StepGraphs | None = None
        self._block_tables = BlockTables()
        self._launched: ForwardPass | None = None

    def prepare_inputs(self, sequences: list[SequenceData], num_blocks: int) -> ModelInput:
        """Lay out the tokens of a step and compute each one's position and cache slot.

        Raises:
            KernelError: A sequence is longer than the model's positions or its block table, or a table names a block that
                a cache of `num_blocks` lacks.
        """
        block_size, num_seqs = self.block_size, len(sequences)
        block_tables = self._block_tables.update([seq.block_table for seq in sequences])
        starts = np.fromiter((seq.num_computed_tokens for seq in sequences), np.int64, num_seqs)
        num_tokens = np.fromiter((len(seq.token_ids) for seq in sequences), np.int64, num_seqs)
        context_lens = starts + num_tokens
        self._check_inputs(sequences, context_lens, block_tables, num_blocks)
        query_start_loc = np.zeros(num_seqs + 1, np.int64)
        np.cumsum(num_tokens, out=query_start_loc[1:])
        total = int(query_start_loc[-1])
        input_ids = np.fromiter(chain.from_iterable(seq.token_ids for seq in sequences), np.int64, total)
        owners = np.repeat(np.arange(num_seqs), num_tokens)  # of each token, its sequence
        unknown = np.flatnonzero(input_ids == PLACEHOLDER)
        placeholders = {
            sequences[owner].seq_id: row for owner, row in zip(owners[unknown].tolist(), unknown.tolist(), strict=True)
        }
        input_ids[unknown] = 0
        positions = _join_ranges(starts, num_tokens)
        blocks = block_tables[owners, positions // block_size].astype(np.int64)
        slot_mapping = blocks * block_size + positions % block_size
        context_lens, first_rows = context_lens.astype(np.int32), query_start_loc.astype(np.int32)
        is_decode = total == num_seqs
        arrays, graphs = [input_ids, positions, slot_mapping, context_lens, block_tables, first_rows], self.graphs
        size = None if graphs is None else graphs.find_size(total, *block_tables.shape)
        if graphs is not None and size is not None:
            ids, places, slots, lens, tables, locs = graphs.inputs.receive(arrays)
        else:
            ids, places, slots, lens, tables, locs = self._tensors(arrays)
        metadata = AttentionMetadata(
            is_decode=is_decode, slot_mapping=slots, block_tables=tables, context_lens=lens, query_start_loc=locs
        )
        if placeholders and self.recent_tokens is not None:
            self.recent_tokens.fill_in(ids, placeholders)
        num_sampled = np.fromiter((1 + seq.num_drafts if seq.num_samples else 0 for seq in sequences), np.int64, num_seqs)
        sampled_rows = _join_ranges(query_start_loc[1:] - num_sampled, num_sampled)
        return ModelInput(ids, places, metadata, sampled_rows.tolist(), size)

    def _check_inputs(
        self, sequences: list[SequenceData], context_lens: np.ndarray, block_tables: np.ndarray, num_blocks: int
    ) -> None:
        longest = int(context_lens.max())
        if longest > self.max_model_len:
            raise KernelError(f"A sequence has {longest} tokens, but the model runs with positions for {self.max_model_len}.")
        num_blocks_of = np.fromiter((len(seq.block_table) for seq in sequences), np.int64, len(sequences))
        for i in np.flatnonzero(context_lens > num_blocks_of * self.block_size):
            raise KernelError(
                f"A sequence of {context_lens[i]} tokens has a table of {num_blocks_of[i]} blocks of {self.block_size}, which is too short."
            )
        lowest, highest = (int(block_tables.min()), int(block_tables.max())) if block_tables.size else (0, 0)
        if lowest < 0 or highest >= num_blocks:
            wrong = lowest if lowest < 0 else highest
            raise KernelError(f"A block table names block {wrong}, but the cache has {num_blocks} blocks.")

    def capture_graphs(self, kv_caches: list[KVCache], max_num_seqs: int, max_num_tokens: int) -> None:
        """Record steps over that cache as CUDA graphs, for later steps to replay."""
        self.graphs = self._make_graphs(kv_caches, max_num_seqs, max_num_tokens)
        self.graphs.capture()

    def measure_graph_memory(self, kv_caches: list[KVCache], max_num_seqs: int, max_num_tokens: int) -> int:
        """Bytes that the graphs will take: the inputs and the tensors of the largest, which all share, plus results and a small fixed cost for each."""
        free = [torch.cuda.mem_get_info(self.device)[0]]
        graphs = self._make_graphs(kv_caches, max_num_seqs, max_num_tokens)
        for size in (graphs.sizes[-1], graphs.sizes[0]):
            graphs.capture([size])
            free.append(torch.cuda.mem_get_info(self.device)[0])
        largest, one_more, count = free[0] - free[1], free[1] - free[2], len(graphs.sizes)
        kept_bytes = graphs.kept_bytes()
        del graphs
        torch.cuda.empty_cache()
        return max(0, largest) + max(0, one_more) * (count - 1) + kept_bytes

    def _make_graphs(self, kv_caches: list[KVCache], max_num_seqs: int, max_num_tokens: int) -> StepGraphs:
        max_blocks = -(-self.max_model_len // self.block_size)
        with_logits = type(self.sampler) is Sampler  # another class may keep them, and the next step overwrites them
        return StepGraphs(self.model, kv_caches, max_num_seqs, max_num_tokens, max_blocks, self.device, with_logits)

    @torch.inference_mode()
    def execute_model(self, sequences: list[SequenceData], kv_caches: list[KVCache]) -> list[SequenceOutput]:
        """Run a step: one output for each sequence, in order. With several ranks, only rank 0 has logits to sample from; with several stages, only
        the last one has outputs."""
        self.launch_model(sequences, kv_caches)
        return self.sample_tokens({})()

    @torch.inference_mode()
    def launch_model(self, sequences: list[SequenceData], kv_caches: list[KVCache]) -> None:
        """The first half of `execute_model`, the forward pass: a GPU gets its work, and the next stage the results. `sample_tokens` must follow."""
        self._launched = None
        if not sequences:
            return
        inputs = self.prepare_inputs(sequences, num_blocks=kv_caches[0][0].shape[0])
        if self.graphs is not None and inputs.graph_size is not None:
            hidden = self.graphs.run(inputs)
            self._launched = ForwardPass(sequences, hidden, inputs.sampled_rows, self.graphs.get_logits(inputs))
            return
        computed = self._run_model(inputs, kv_caches)
        if computed is not None:
            self._launched = ForwardPass(sequences, computed, inputs.sampled_rows)

    def _run_model(self, inputs: ModelInput, kv_caches: list[KVCache]) -> Tensor | None:
        """Hidden states, `[num_tokens, hidden_size]`. None on a stage that has handed them to the next one."""
        batch = (inputs.input_ids, inputs.positions, kv_caches, inputs.metadata)
        if self.stage is None:
            return self.model(*batch)  # type: ignore[no-any-return]
        received = self.stage.recv(len(inputs.input_ids))
        hidden = self.model(*batch) if received is None else self.model(*batch, received)
        if isinstance(hidden, IntermediateTensors):
            self.stage.send(hidden)
            return None
        return hidden  # type: ignore[no-any-return]

    @torch.inference_mode()
    def sample_tokens(self, masks: Masks) -> Callable[[], list[SequenceOutput]]:
        """The second half, under the masks of structured outputs. The function that is returned waits for the results."""
        launched, self._launched = self._launched, None
        if launched is None:  # nothing to sample from
            return list
        sequences, hidden, sampled_rows, logits = launched
        apply_masks(sequences, masks)
        is_all = len(sampled_rows) == len(hidden)  # in order
        # index_select, because hidden[rows] would wake all threads of torch for a few rows
        hidden_rows = hidden if is_all else hidden.index_select(0, self._tensor(sampled_rows))
        finish_sampling = self._sample(sequences, hidden_rows, logits if is_all else None)
        prompt_logprobs: dict[int, dict[int, dict[int, Logprob]]] = {}
        start = 0
        for i, seq in enumerate(sequences):
            end = start + len(seq.token_ids)
            if seq.request.sampling_params.prompt_logprobs is not None:
                prompt_logprobs[i] = self._prompt_logprobs(seq, hidden[start:end])
            start = end

        def finish() -> list[SequenceOutput]:
            outputs = finish_sampling()
            for i, logprobs in prompt_logprobs.items():
                outputs[i].prompt_logprobs = logprobs
            return outputs

        return finish

    @torch.inference_mode()
    def profile_run(self, num_tokens: int, num_seqs: int, kv_caches: list[KVCache], params: SamplingParams | None = None) -> None:
        """Run a prefill of `num_tokens` tokens, split evenly over `num_seqs`, and sample from all of them. A stage does so alone.

        `kv_caches` needs only one block, whose contents become meaningless. `params` are by default those that take the most memory.
        """
        params = params or SamplingParams(temperature=1.0, top_p=0.9)
        request = EngineCoreRequest("profile", [0], params, max_num_tokens=num_tokens)
        sequences = []
        for i in range(num_seqs):
            length = num_tokens // num_seqs + (i < num_tokens % num_seqs)
            table = [0] * -(-length // self.block_size)
            sequences.append(
                SequenceData(request, i, 0, [0] * length, 0, table, 0, [], num_samples=1, num_drafts=0, is_decode=False)
            )
        with nullcontext() if self.stage is None else self.stage.alone():
            self.execute_model(sequences, kv_caches)

    def _sample(
        self, sequences: list[SequenceData], hidden: Tensor, logits: Tensor | None = None
    ) -> Callable[[], list[SequenceOutput]]:
        """Sample a token for every sequence that needs one, one more for each sibling forked now, and one after each draft.

        `hidden` has a row for each prediction: the last tokens of sequences, and their drafts; `logits` are theirs, if they are known. Returns a function that waits for the tokens.
        """
        rows, hidden_rows, owners = _list_rows(sequences)
        chosen = self._choose(hidden, rows, hidden_rows, logits) if rows else None
        if rows:
            self._remember(rows, chosen)

        def finish() -> list[SequenceOutput]:
            outputs = [SequenceOutput() for _ in sequences]
            if chosen is None:
                return outputs
            tokens = chosen.wait() if isinstance(chosen, PendingTokens) else chosen
            for row, owner, token in zip(rows, owners, tokens, strict=True):
                output = outputs[owner]
                output.token_ids.append(token.token_id)
                output.error = output.error or row.error
                if token.logprobs is not None:
                    output.logprobs = [*(output.logprobs or []), token.logprobs]
            return outputs

        return finish

    def _choose(
        self, hidden: Tensor, rows: list[SamplingRow], hidden_rows: list[int], logits: Tensor | None
    ) -> PendingTokens | list[SampledToken] | None:
        """A token for each row; `hidden_rows` says which of `hidden` it is drawn from. None on ranks that do not sample."""
        indices = self._tensor(hidden_rows) if len(rows) > len(hidden) else None
        if self.model.choose is not None and type(self.sampler) is Sampler and can_choose_in_parts(rows):
            hidden = hidden if indices is None else hidden.index_select(0, indices)
            token_ids = self.model.choose(hidden, partial(choose_in_part, rows))
            return None if token_ids is None else PendingTokens(token_ids)
        if logits is None:
            logits = self.model.compute_logits(hidden)
        if logits is None:
            return None
        logits = logits if indices is None else logits.index_select(0, indices)
        try:
            if self.recent_tokens is not None and type(self.sampler) is Sampler:
                return self.sampler.launch(logits, rows)
            return self.sampler.sample(logits, rows)
        except Exception:
            self._remember(rows, None)  # the other ranks wait for tokens
            raise

    def _remember(self, rows: list[SamplingRow], tokens: PendingTokens | list[SampledToken] | None) -> None:
        """Keep a step's tokens on the device for placeholders in the next steps. Ranks that do not sample, and have None, get them."""
        if self.recent_tokens is None:
            return
        if tokens is None:
            token_ids = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        elif isinstance(tokens, PendingTokens):
            token_ids = tokens.token_ids
        else:
            token_ids = self._tensor([token.token_id for token in tokens])
        self.recent_tokens.add({row.seq.seq_id: i for i, row in enumerate(rows)}, token_ids)

    def _prompt_logprobs(self, seq: SequenceData, hidden: Tensor) -> dict[int, dict[int, Logprob]]:
        """Log-probabilities of the prompt tokens that follow the computed ones, by their position in the prompt."""
        num_logprobs = seq.request.sampling_params.prompt_logprobs or 0
        first = seq.num_computed_tokens + 1
        following = seq.request.prompt_token_ids[first : first + seq.num_tokens]
        result: dict[int, dict[int, Logprob]] = {}
        for i in range(0, len(following), PROMPT_LOGPROB_ROWS):
            token_ids = following[i : i + PROMPT_LOGPROB_ROWS]
            logits = self.model.compute_logits(hidden[i : i + len(token_ids)])
            if logits is None:
                continue
            result.update(enumerate(top_logprobs(logits, token_ids, num_logprobs), start=first + i))
        return result

    def _tensors(self, arrays: list[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays] if self.device.type == "cpu" else pack_to_device(arrays, self.device)

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        if self.device.type == "cpu":  # nothing to transfer
            return torch.tensor(values, dtype=dtype)
        return to_device(values, self.device, dtype)


def _join_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`counts[i]` numbers from `starts[i]` on, for each i, one range after another."""
    ends = counts.cumsum()
    joined: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    return joined


def _list_rows(sequences: list[SequenceData]) -> tuple[list[SamplingRow], list[int], list[int]]:
    """What to sample in a step, and of each: the row of hidden states to sample from, and the sequence's place in the step."""
    if all(seq.num_samples == 1 and not seq.num_drafts for seq in sequences):  # as in most steps
        places = list(range(len(sequences)))
        return [SamplingRow(seq, seq.index) for seq in sequences], places, places
    rows: list[SamplingRow] = []
    hidden_rows: list[int] = []
    owners: list[int] = []
    num_hidden_rows = 0
    for owner, seq in enumerate(sequences):
        for num_drafts in range(1 + seq.num_drafts if seq.num_samples else 0):
            rows += [SamplingRow(seq, seq.index + sibling, num_drafts) for sibling in range(seq.num_samples)]
            hidden_rows += [num_hidden_rows] * seq.num_samples
            owners += [owner] * seq.num_samples
            num_hidden_rows += 1
    return rows, hidden_rows, owners
