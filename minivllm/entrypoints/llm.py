"""`LLM`: offline generation for a list of prompts. Mirrors `vllm/entrypoints/llm.py`."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import uuid
from collections import abc
from numbers import Integral
from typing import Any

from tqdm.auto import tqdm

from minivllm.config import EngineArgs
from minivllm.engine.input_processor import Prompt
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.tokenizer import Tokenizer, check_template_kwargs
from minivllm.errors import RequestError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)


class LLM:
    """A language model that generates text offline.

    Args:
        model: A known name ("smollm2-135m"), a folder, a .gguf file, or a Hugging Face name.
        **kwargs: Any other argument of `EngineArgs`, for example `max_num_seqs` or `enable_prefix_caching`.

    Example:
        >>> llm = LLM(model="smollm2-135m")
        >>> outputs = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2))
        >>> outputs[0].outputs[0].text
        ' Paris.'
    """

    def __init__(self, model: str = "smollm2-135m", **kwargs: Any) -> None:
        unknown = kwargs.keys() - set(EngineArgs.names())
        if unknown:
            raise TypeError(f"LLM has no argument {', '.join(sorted(unknown))}; it has {', '.join(EngineArgs.names())}.")
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **kwargs))
        name = uuid.uuid4().hex[:8]  # unique among all ids in the engine
        self._request_ids = (f"llm-{name}-{i}" for i in itertools.count())

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: A string, the token ids of one prompt, a dict with "prompt" or "prompt_token_ids", or a list of these.
            sampling_params: One for all prompts, or a list with one for each; `get_default_sampling_params()` if None.
            use_tqdm: Show progress.
            tokenization_kwargs: `{"add_special_tokens": False}` for texts without the tokenizer's special tokens around them.

        Returns:
            One output per prompt, in the order of the prompts. A request that cannot be served has its `error` set and
            `outputs` empty, and a warning is logged; the others finish.

        Raises:
            RequestError: No request can be served, the two lists differ in length, or the engine still has requests that were
                added to it directly.
        """
        prompt_list = _with_options(_as_list(prompts), tokenization_kwargs or {})
        params_list = self._params_for(prompt_list, sampling_params)
        return self._run(prompt_list, params_list, use_tqdm)

    def chat(
        self,
        messages: abc.Sequence[Any],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of a conversation, or of each in a list, with the model's chat template.

        Args:
            messages: Dicts with "role" and "content", or a list of such conversations.
            sampling_params, use_tqdm: As for `generate`.
            add_generation_prompt: End the prompt with the opening of the assistant's turn; so it does, unless the final message is continued.
            continue_final_message: Go on with the last message.
            tools: Functions that the model may call, in OpenAI's form. Its calls are in the text.
            chat_template_kwargs: Variables of the chat template, such as `enable_thinking`.

        Raises:
            RequestError: As `generate`, and if both `add_generation_prompt` and `continue_final_message` are true.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, (list, tuple)):
            raise RequestError(f"messages must be a list of dicts, or a list of such lists, not {type(messages).__name__}.")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt are both True: leave one out.")
        options = check_template_kwargs(dict(chat_template_kwargs or {})) | ({"tools": tools} if tools else {})
        if continue_final_message:
            options["continue_final_message"] = True
        ends_open = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        is_one = not messages or not isinstance(messages[0], (list, tuple))
        prompts: list[Prompt | RequestError] = []
        for conversation in [messages] if is_one else messages:
            try:
                prompts.append(tokenizer.apply_chat_template(conversation, ends_open, **options))
            except RequestError as error:
                prompts.append(error)
        return self._run(prompts, self._params_for(prompts, sampling_params), use_tqdm)

    def describe_model(self) -> str:
        """How the model's layers run, in words: as written, in compiled kernels on a CPU, or as CUDA graphs.

        Raises:
            ConfigError: There are several replicas, which run in other processes.

        Example:
            >>> LLM("smollm2-135m", enforce_eager=True).describe_model()
            'minivllm.models.llama.LlamaForCausalLM: as written'
        """
        return self.llm_engine.executor.collective_rpc("describe_model")[0]  # type: ignore[no-any-return]

    def get_tokenizer(self) -> Tokenizer:
        """The model's `Tokenizer`. Raises RequestError if the engine was made with skip_tokenizer_init=True."""
        if self.llm_engine.tokenizer is None:
            raise RequestError("There is no tokenizer (skip_tokenizer_init=True).")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use if none are given: the defaults of `SamplingParams`, changed as the model's generation_config.json says.

        Change some with `dataclasses.replace(llm.get_default_sampling_params(), max_tokens=100)`.
        """
        return SamplingParams(**self.llm_engine.model_config.sampling_defaults)

    def _params_for(self, prompts: list[Any], params: Any) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * len(prompts)
        if not isinstance(params, (list, tuple)):
            raise RequestError(f"sampling_params must be a SamplingParams or a list of them, not {type(params).__name__}.")
        if len(params) != len(prompts):
            raise RequestError(f"There are {len(prompts)} prompts but {len(params)} sampling_params: give one, or one for each.")
        return list(params)

    def _run(self, prompts: list[Any], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        """Add all requests and run the engine until they finish. A prompt that is a RequestError becomes a failed output."""
        if num_others := self.llm_engine.get_num_unfinished_requests():
            raise RequestError(f"The engine has {num_others} unfinished requests that you added: finish or abort them first.")
        outputs: dict[str, RequestOutput] = {}
        request_ids = [next(self._request_ids) for _ in prompts]
        errors: list[RequestError] = []
        try:
            for request_id, prompt, param in zip(request_ids, prompts, params, strict=True):
                try:
                    if isinstance(prompt, RequestError):
                        raise prompt
                    if isinstance(param, SamplingParams):  # otherwise add_request raises
                        param = copy.copy(param)
                        object.__setattr__(param, "output_kind", RequestOutputKind.FINAL_ONLY)
                    self.llm_engine.add_request(request_id, prompt, param)
                except RequestError as error:
                    errors.append(error)
                    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
                    text = text if isinstance(text, str) else None
                    outputs[request_id] = RequestOutput(request_id, text, [], [], finished=True, error=str(error))
            if errors and len(errors) == len(prompts):
                raise errors[0]
            for request_id in outputs:
                logger.warning("Prompt %d is skipped: %s", request_ids.index(request_id), outputs[request_id].error)
            self._run_engine(outputs, len(prompts) - len(errors), use_tqdm)
        except BaseException:  # Ctrl-C too: leave no request behind in the engine
            for request_id in request_ids:
                self.llm_engine.abort_request(request_id)
            raise
        return [outputs[request_id] for request_id in request_ids]

    def _run_engine(self, outputs: dict[str, RequestOutput], num_requests: int, use_tqdm: bool) -> None:
        num_tokens = 0
        is_quiet = not use_tqdm or sys.stderr is None  # closed, as in some daemons
        with tqdm(total=num_requests, desc="Generating", unit="request", disable=is_quiet, dynamic_ncols=True) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if output.finished:
                        outputs[output.request_id] = output
                        num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                        elapsed = bar.format_dict["elapsed"]
                        if elapsed:
                            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)
                        bar.update()


def _with_options(prompts: list[Prompt], options: dict[str, Any]) -> list[Prompt]:
    """Give the options of tokenization to each prompt that is a text."""
    if unknown := options.keys() - {"add_special_tokens"}:
        raise RequestError(f"tokenization_kwargs has {min(unknown)!r}, but may have only add_special_tokens.")
    dicts = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    return [prompt | options if isinstance(prompt, dict) else prompt for prompt in dicts] if options else prompts


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list. A flat list of integers is one prompt's token ids."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # arrays and tensors
        prompts = prompts.tolist()
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(f"prompts must be a string, token ids, or a list of these, not {type(prompts).__name__}.")
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [list(prompts)]
    return list(prompts)
