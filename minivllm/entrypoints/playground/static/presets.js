// Situations from the lessons. What one leaves out is as in DEFAULTS, which are those of `Settings` in session.py.

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
];
