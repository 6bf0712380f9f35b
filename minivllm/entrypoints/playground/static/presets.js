// Situations from the lessons. What one leaves out is as in DEFAULTS, which are those of `Settings` in session.py. `widget` is the cell of
// the lesson whose picture it can take the place of in the book. Links have their numbers: new ones come last.

export const DEFAULTS = {
  num_gpu_blocks: 96,
  block_size: 16,
  max_num_seqs: 16,
  max_num_batched_tokens: 2048,
  num_requests: 64,
  arrival_rate: 4,
  mean_prompt_len: 64,
  mean_output_len: 64,
  num_shared_prompt_tokens: 0,
  seed: 0,
  distribution: "longtail",
  arrivals: "poisson",
  scheduler: "continuous",
  preemption_mode: "recompute",
  enable_chunked_prefill: false,
  enable_prefix_caching: false,
};

export const PRESETS = [
  { name: "a quiet afternoon", text: "Four requests a second, and room for all. (Lesson 07)", settings: {} },
  {
    name: "the convoy",
    text: "Static batches: nobody joins until the longest text of the batch has ended. Change it to continuous. (Lesson 09)",
    widget: "race",
    settings: { scheduler: "static", arrivals: "at-once", num_requests: 48, num_gpu_blocks: 256 },
  },
  {
    name: "a cache that is too small",
    text: "Texts grow until no block is free; then the latest arrival is preempted. Compare recompute with swap. (Lesson 07)",
    settings: { num_gpu_blocks: 40, arrivals: "at-once", num_requests: 24, mean_output_len: 96 },
  },
  {
    name: "a prompt that fills the cache",
    text: "Long prompts among short answers: each stalls all the others for a step. Turn on chunked prefill. (Lesson 10)",
    settings: { num_gpu_blocks: 256, mean_prompt_len: 512, mean_output_len: 24, arrival_rate: 2 },
  },
  {
    name: "all share a prompt",
    text: "All prompts begin with the same 256 tokens, and the prefix cache knows them: look at the thick outlines. (Lesson 10)",
    settings: { num_gpu_blocks: 160, num_shared_prompt_tokens: 256, mean_prompt_len: 16, num_requests: 32, arrival_rate: 2, enable_prefix_caching: true },
  },
  {
    name: "small blocks",
    text: "One token in a block: no slot is wasted, and the tables are long. (Lesson 04)",
    settings: { block_size: 1, num_gpu_blocks: 1024, num_requests: 12, mean_prompt_len: 24, mean_output_len: 48 },
  },
  {
    name: "twelve requests, four places",
    text: "Most answers are short, and whoever ends makes room for the next. Change it to static. (Lesson 00)",
    widget: "player",
    settings: { max_num_seqs: 4, num_requests: 12, arrivals: "at-once", mean_prompt_len: 8, mean_output_len: 11, seed: 363 },
  },
  {
    name: "a crowd in small blocks",
    text: "Too few blocks: who is preempted waits in the host's memory, and comes back to other blocks. (Lesson 04)",
    widget: "player",
    settings: { num_gpu_blocks: 24, block_size: 4, max_num_seqs: 6, num_requests: 12, arrivals: "at-once", mean_prompt_len: 9, mean_output_len: 12, preemption_mode: "swap" },
  },
  {
    name: "forty requests",
    text: "The lesson's knobs as they stand at first. Try 2 sequences in a step; then 16, with 32 blocks. (Lesson 07)",
    widget: "knobs",
    settings: { num_gpu_blocks: 128, max_num_seqs: 8, max_num_batched_tokens: 400, num_requests: 40, arrival_rate: 5, mean_output_len: 48, seed: 1 },
  },
  {
    name: "three requests, nine blocks",
    text: "Nine blocks are too few for two whole answers, so the latest arrival gives way, and is computed again. (Lesson 07)",
    widget: "player",
    settings: { num_gpu_blocks: 9, num_requests: 3, arrivals: "at-once", distribution: "uniform", mean_prompt_len: 30, mean_output_len: 40 },
  },
  {
    name: "two decode, a third arrives",
    text: "Twelve tokens in a step: the third prompt comes in chunks, beside the decodes of the others. (Lesson 08)",
    widget: "player",
    settings: { num_gpu_blocks: 64, block_size: 4, max_num_seqs: 4, max_num_batched_tokens: 12, num_requests: 3, arrival_rate: 20, mean_prompt_len: 10, mean_output_len: 12, seed: 2687, enable_chunked_prefill: true },
  },
  {
    name: "one beginning, four requests",
    text: "All prompts begin with the same 12 tokens. Who comes later finds them in the cache: thick outlines. (Lesson 10)",
    widget: "player",
    settings: { num_gpu_blocks: 40, block_size: 4, max_num_seqs: 4, num_requests: 4, arrival_rate: 10, distribution: "uniform", num_shared_prompt_tokens: 12, mean_prompt_len: 5, mean_output_len: 8, enable_prefix_caching: true },
  },
];
