"""Structured outputs: what finishes is what was asked for, whatever happens on the way, and nobody else's tokens change."""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import json
import pathlib
import re
import shutil
from dataclasses import replace
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_invariants import Job, run
from test_invariants_on_a_model import Seer, alone
from thread_ranks import engine_on_threads
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams, StaticBatchScheduler, StructuredOutputsParams
from minivllm.config import EngineArgs
from minivllm.core.structured_output import FORMATS, GrammarCompiler
from minivllm.errors import RequestError

ROOT = pathlib.Path(__file__).parents[2]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cé"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: greeting " " NAME\ngreeting: "Hello" | "Good morning"\nNAME: /[A-Z][a-z]{1,8}/'
GBNF = 'root ::= word (", " word)?\nword ::= "red" | "green" | "blue"'
CHOICES = ["red", "green", 'a "quoted" text', "back\\slash", "über\nzwei Zeilen"]


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


FORMS = {
    "schema": (StructuredOutputsParams(json=PERSON), is_person),
    "schema as text": (
        StructuredOutputsParams(json=json.dumps({"type": "integer", "maximum": 99})),
        lambda text: int(text) <= 99,
    ),
    "object": (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        StructuredOutputsParams(regex=r"\d{3}-\d{4}( ext\. \d{1,4})?"),
        re.compile(r"[0-9]{3}-[0-9]{4}( ext\. [0-9]{1,4})?").fullmatch,
    ),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "lark": (StructuredOutputsParams(grammar=LARK), re.compile("(Hello|Good morning) [A-Z][a-z]{1,8}").fullmatch),
    "gbnf": (StructuredOutputsParams(grammar=GBNF), re.compile("(red|green|blue)(, (red|green|blue))?").fullmatch),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_text_is_what_was_asked_for(llm, form):
    wanted, is_right = FORMS[form]
    params = [
        SamplingParams(structured_outputs=wanted, max_tokens=60, temperature=temperature, seed=3, n=n)
        for temperature, n in ((0.0, 1), (1.0, 3))
    ]
    prompt = "The person, the colour or the number, as asked for: "
    completions = [item for output in llm.generate([prompt] * 2, params, use_tqdm=False) for item in output.outputs]
    for completion in completions:
        assert completion.finish_reason == "length" or is_right(completion.text)
    assert form == "object" or any(completion.finish_reason == "stop" for completion in completions)


@pytest.mark.slow
def test_thousands_of_choices_and_no_more_than_that(llm):
    choices = [f"choice number {number}" for number in range(4096)]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=choices), max_tokens=20)
    assert llm.generate(["One: "], params, use_tqdm=False)[0].outputs[0].text in choices
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a" * 2**18))
    with pytest.raises(RequestError, match="structured_outputs has 262144 characters, but must have at most 131072"):
        llm.generate(["a"], params, use_tqdm=False)


@pytest.mark.slow
def test_a_grammar_has_the_last_word_over_min_tokens(llm):
    [seven] = llm.get_tokenizer().encode("7")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["7"]), min_tokens=5, stop_token_ids=[seven])
    [output] = llm.generate(["A number: "], params, use_tqdm=False)
    assert output.error is None and output.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_others_tokens_are_bit_equal(llm):
    """Half of a batch has a schema; the logits of the other half are what they were."""
    prompts = [f"Once upon a time, number {number} of the" for number in range(16)]
    plain = SamplingParams(temperature=0.8, max_tokens=12, logprobs=3, ignore_eos=True, seed=1)
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON), max_tokens=12)
    without = llm.generate(prompts, plain, use_tqdm=False)
    with_schema = llm.generate(prompts, [structured if number % 2 else plain for number in range(16)], use_tqdm=False)
    for number in range(0, 16, 2):
        assert with_schema[number].outputs[0].token_ids == without[number].outputs[0].token_ids
        assert with_schema[number].outputs[0].logprobs == without[number].outputs[0].logprobs


@pytest.mark.slow
def test_an_end_that_is_ignored_or_comes_too_soon(llm):
    """The grammar decides where the text may end; where it may go on, `ignore_eos` and `min_tokens` make it do so."""
    digits = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]+"), max_tokens=10)
    for params in (replace(digits, ignore_eos=True), replace(digits, min_tokens=10)):
        [output] = llm.generate(["A number: "], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 10 and output.outputs[0].text.isdecimal()
    for params in (replace(digits, ignore_eos=True), replace(digits, min_tokens=10)):
        params = replace(params, structured_outputs=StructuredOutputsParams(choice=["7"]))
        [output] = llm.generate(["A number: "], params, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("7", "stop"), "nothing can follow"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "structured_outputs is empty, but must have exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs has regex and choice, but must have exactly one"),
        ({"regex": 5}, "must have regex as text, not 5"),
        ({"grammar": ""}, "must have grammar as text, not ''"),
        ({"choice": []}, "must have choice as a list of texts"),
        ({"choice": [1]}, "must have choice as a list of texts"),
        ({"json": {"a": object()}}, "has a schema that is not JSON"),
        (
            {"json": functools.reduce(lambda inner, _: {"items": inner}, range(3000), {})},
            "has a schema that is nested too deeply",
        ),
    ],
)
def test_wrong_parameters_are_refused_where_they_are_made(fields, sentence):
    with pytest.raises(RequestError, match=sentence):
        StructuredOutputsParams(**fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"json": {"type": "no such type"}}, "no such type"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": "{"}, ""),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"regex": "(["}, "unclosed character class"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": 'start: start "a"'}, ""),
        ({"grammar": "root ::= ("}, ""),
        ({"grammar": "root ::= " + "(" * 3000}, ""),
        ({"regex": r"[^\s\S]"}, ""),
        ({"json": {"$ref": "#"}}, ""),
        ({"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}}, "items; max is"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, ""),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_cause(llm, fields, cause):
    with pytest.raises(RequestError, match=f"structured_outputs cannot be compiled: .*{cause}"):
        llm.generate(["a"], SamplingParams(structured_outputs=StructuredOutputsParams(**fields)), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def accepts(smollm2_path, tokenizer):
    """Whether a text is one that a grammar allows, without a model."""
    compiler = GrammarCompiler(smollm2_path, 49152)

    def check(text, **fields):
        matcher = compiler.compile(StructuredOutputsParams(**fields), (2,))._matcher
        return all(matcher.consume_token(token_id) for token_id in tokenizer.encode(text, False)) and matcher.is_accepting()

    yield check
    compiler.shutdown()


@pytest.mark.parametrize(
    "form", ["password", "binary", "path", "file-path", "uuid4", "int32", "base64", "ipvanyaddress", "whatever"]
)
def test_a_format_that_only_comments_constrains_nothing(accepts, form):
    inner = {"type": "string", "format": form}
    for schema in (
        {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "additionalProperties": {"anyOf": [inner, {"type": "null"}]}},
        {"$defs": {"format": inner}, "type": "object", "patternProperties": {"^a$": {"$ref": "#/$defs/format"}}},
    ):
        assert accepts('{"a": "x"}', json=schema) and not accepts('{"a": 5}', json=schema)
    assert accepts("5", json={"type": "integer", "format": form}) and accepts('"x"', json={"enum": ["x"], "format": form})


def test_the_formats_that_are_enforced_are_those_that_the_docs_name(accepts):
    right = {
        "date": "2026-11-27", "date-time": "2026-11-27T10:00:00Z", "duration": "P1D", "email": "a@b.de", "hostname": "b.de", "ipv4": "1.2.3.4",
        "ipv6": "::1", "time": "10:00:00Z", "uri": "http://b.de/", "uuid": "123e4567-e89b-12d3-a456-426614174000",
    }  # fmt: skip
    assert right.keys() == FORMATS
    for form, text in right.items():
        schema = {"type": "string", "format": form}
        assert accepts(json.dumps(text), json=schema) and not accepts('"?!"', json=schema), form
    assert ", ".join(f"`{form}`" for form in sorted(FORMATS)) in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_values_and_names_that_read_like_keywords_are_left_alone(accepts):
    assert accepts('{"format": "password"}', json={"const": {"format": "password"}})
    schema = {
        "type": "object",
        "properties": {"format": {"type": "integer"}, "uniqueItems": {"type": "null"}},
        "required": ["format"],
    }
    assert accepts('{"format": 5, "uniqueItems": null}', json=schema) and not accepts('{"format": "x"}', json=schema)
    assert accepts("[1, 1]", json={"type": "array", "uniqueItems": False, "items": {"type": "integer"}})


@pytest.mark.parametrize(
    "keyword", ["not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired", "unevaluatedProperties"]
)
@pytest.mark.parametrize(
    "embed",
    [
        lambda schema: schema,
        lambda schema: {"type": "object", "properties": {"a": schema}},
        lambda schema: {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}},
        lambda schema: {"$defs": {"x": schema}, "type": "object", "additionalProperties": {"$ref": "#/$defs/x"}},
    ],
    ids=["at the top", "in a property", "in an alternative", "behind a reference"],
)
def test_what_is_not_supported_is_refused_by_its_keyword_everywhere(accepts, keyword, embed):
    value = {"dependentRequired": {"a": ["b"]}, "uniqueItems": True, "unevaluatedProperties": False}.get(
        keyword, {"type": "string"}
    )
    with pytest.raises(RequestError, match=f'cannot be compiled: JSON schemas with "{keyword}" are not supported'):
        accepts("", json=embed({keyword: value}))


def test_overlapping_alternatives_are_refused_by_their_keyword_and_others_are_taken(accepts):
    apart = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
    assert accepts("5", json=apart) and accepts('"a"', json=apart) and not accepts("null", json=apart)
    overlapping = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    for schema in (overlapping, {"type": "array", "items": overlapping}):
        with pytest.raises(
            RequestError, match='schemas with "oneOf" are not supported if its alternatives may overlap: use "anyOf"'
        ):
            accepts("", json=schema)


CHARACTERS = ["5", "a", "_", "Z", " ", "\t", "\u00a0", "\u2003", "é", "٣", "日", "-"]


@pytest.mark.parametrize("regex", [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[\d_]", r"[^\w]", r"[\D5]", r"\\d", r"[\w-]"])
def test_classes_of_characters_mean_the_same_in_regular_expressions_and_in_json_patterns(accepts, regex):
    for character in CHARACTERS:
        expected = re.fullmatch(regex, character, re.ASCII) is not None
        if r"\s" in regex.lower() and character in "\u00a0\u2003":
            expected = not expected  # white space is that of all scripts
        quoted = json.dumps(character, ensure_ascii=False)
        assert accepts(character, regex=regex) == expected
        if character != "\t":  # which JSON escapes
            assert accepts(quoted, json={"type": "string", "pattern": f"^{regex}$"}) == expected, (regex, character)


def test_what_pydantic_writes_is_taken(accepts):
    class Kind(enum.Enum):
        A = "a"

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]
        born: datetime.date

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        weight: decimal.Decimal

    class All(pydantic.BaseModel):
        pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
        secret: pydantic.SecretStr
        data: bytes
        folder: pathlib.Path
        number: pydantic.UUID4
        address: pydantic.IPvAnyAddress
        site: pydantic.AnyUrl
        pair: tuple[int, str]
        kinds: list[Kind]
        by_name: dict[str, int]
        code: Annotated[str, pydantic.StringConstraints(pattern=r"^\d{3}$")]
        maybe: int | None = None

    text = (
        '{"pet": {"kind": "cat", "born": "2026-11-27"}, "secret": "s", "data": "d", "folder": "/", "number": "n", "address": "x", '
        '"site": "http://b.de/", "pair": [1, "a"], "kinds": ["a"], "by_name": {"a": 1}, "code": "123", "maybe": null}'
    )
    assert accepts(text, json=All.model_json_schema())


def chain(length):
    """A schema, a grammar, and one of llama.cpp's, with this many rules, each of which names the next."""
    refs = {f"a{i:x}": {"allOf": [{"$ref": f"#/$defs/a{i + 1:x}"}]} for i in range(length)} | {f"a{length:x}": {"type": "object"}}
    rules = [f"a{i:x} ARROW a{i + 1:x}\n" for i in range(length)] + [f'a{length:x} ARROW "x"\n']
    return [
        {"json": {"$defs": refs, "$ref": "#/$defs/a0"}},
        {"grammar": "start: a0\n" + "".join(rules).replace(" ARROW", ":")},
        {"grammar": "root ::= a0\n" + "".join(rules).replace("ARROW", "::=")},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fields", chain(2500), ids=["schema", "lark", "gbnf"])
def test_a_long_chain_does_not_overflow_the_stack(llm, fields):
    """It would end the process: llguidance compiles recursively."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields), temperature=0, max_tokens=8)
    [output] = llm.generate(["a"], params, use_tqdm=False)
    assert output.error is None or "items; max is 2000" in output.error  # a limit, which depends on the tokens drawn


@pytest.mark.slow
@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "<|endoftext|>", "a\x7fb", "\U0010ffff2", "😀"])
def test_a_text_that_reads_like_a_special_token_is_text(llm, text):
    """Also one that reads like the end of an answer."""
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}
    params = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(choice=[text]))
    wanted = [params, replace(params, structured_outputs=StructuredOutputsParams(json=schema))]
    choice, document = llm.generate(["a"] * 2, wanted, use_tqdm=False)
    assert choice.outputs[0].text == text and json.loads(document.outputs[0].text) == {text: text}


@pytest.mark.slow
def test_a_limit_that_is_met_on_the_way_fails_the_request_alone(llm):
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    schema = {"type": "object", "properties": {"a": {"const": "Once upon a time"}, "b": many}, "required": ["a", "b"]}
    heavy = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), temperature=0, max_tokens=100)
    plain = SamplingParams(temperature=0, max_tokens=8)
    failed, *others = llm.generate(["a"] * 5, [heavy, plain, plain, plain, plain], use_tqdm=False)
    assert failed.error.startswith("structured_outputs cannot go on: ") and failed.outputs[0].finish_reason == "error"
    assert {(output.error, output.outputs[0].finish_reason) for output in others} == {(None, "length")}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_no_token_fail_the_request_alone(llm, temperature):
    wanted = StructuredOutputsParams(regex="[0-9]+")
    nothing = SamplingParams(structured_outputs=wanted, allowed_token_ids=[5], temperature=temperature)
    plain = SamplingParams(temperature=temperature, max_tokens=4, seed=0)
    failed, other = llm.generate(["a"] * 2, [nothing, plain], use_tqdm=False)
    assert failed.error == "structured_outputs and allowed_token_ids together leave no token to choose from."
    assert (other.error, other.outputs[0].finish_reason) == (None, "length")


@pytest.mark.slow
def test_a_request_whose_grammar_is_being_compiled_is_one_of_its_clients(llm):
    """A client that is gone, or starts again, is rid of it."""
    engine = llm.llm_engine
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]+"), max_tokens=8)
    request = engine.input_processor.process_inputs("compiling", "a", params).core_request
    engine.core.add_request(request)
    assert engine.core.requests_of(0) == ["compiling"] and engine.core.requests_of(1) == []
    with pytest.raises(RequestError, match="There is already a request 'compiling'"):
        engine.core.add_request(request)
    engine.core.abort_requests(engine.core.requests_of(0))
    assert engine.core.requests_of(0) == [] and not engine.has_unfinished_requests()


# -- whatever happens on the way -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory, smollm2_path):
    """A model of random weights with the default model's tokens: it says anything that it may."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.4)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (smollm2_path / name).exists():
            shutil.copy(smollm2_path / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tokens_alone(tiny_folder):
    return alone(LLM(str(tiny_folder), num_gpu_blocks_override=100))


@st.composite
def structured_jobs(draw) -> Job:
    form = draw(st.sampled_from([None, *FORMS]))
    max_tokens = draw(st.integers(1, 40))
    params = SamplingParams(
        n=draw(st.integers(1, 2)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 5)),
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, max_tokens])),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([None, None, "e", "zz"])),
        logprobs=draw(st.sampled_from([None, 0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2])),
        structured_outputs=form and FORMS[form][0],
    )
    prompt = draw(st.lists(st.integers(3, 49151), min_size=1, max_size=20))
    return Job(prompt, params, draw(st.integers(0, 10)), 0, draw(st.sampled_from([None, None, None, 3])))


@st.composite
def engine_arguments(draw):
    max_num_seqs = draw(st.integers(2, 5))
    args = {
        "block_size": draw(st.sampled_from([1, 4, 8])),
        "max_num_seqs": max_num_seqs,
        "max_model_len": 64,
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "swap_space": 1e-4,
        "num_speculative_tokens": draw(st.sampled_from([0, 2, 4])),
        "scheduler_cls": draw(st.sampled_from([None, None, StaticBatchScheduler])),
    }
    args["num_gpu_blocks_override"] = -(-64 // args["block_size"]) + draw(st.integers(0, 12))
    if draw(st.booleans()):
        args |= {"enable_chunked_prefill": True, "max_num_batched_tokens": draw(st.integers(max_num_seqs, 16))}
    return args


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 5, suppress_health_check=[HealthCheck.too_slow])
@given(
    args=engine_arguments(),
    workload=st.lists(structured_jobs(), min_size=2, max_size=6),
    size=st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]),
)
def test_a_structured_answer_is_right_or_ends_by_length_in_any_workload(tiny_folder, tokens_alone, args, workload, size):
    """In one worker, in two, and in two stages, of which the last one gets the masks."""
    num_ranks, num_stages = size
    in_flight = 1 if args["scheduler_cls"] is StaticBatchScheduler else num_stages
    engine = engine_on_threads(EngineArgs(str(tiny_folder), **args), num_ranks, num_stages, in_flight)
    if args["num_speculative_tokens"]:
        engine.scheduler.speculation.proposer = Seer({str(i): tokens_alone(job) for i, job in enumerate(workload)}, 49152)
    decode = engine.tokenizer.decode
    is_right = dict(FORMS.values())
    for (_, result), job in zip(run(engine, workload).items(), workload, strict=True):
        if result.error == "aborted":
            continue
        assert result.finished and result.error is None
        assert result.tokens == tokens_alone(job)
        for tokens, reason in zip(result.tokens, result.reasons, strict=True):
            assert reason in ("stop", "length")
            text = decode(tokens)
            was_cut = job.params.stop is not None and any(stop in text for stop in job.params.stop)
            if job.params.structured_outputs is not None and reason == "stop" and not was_cut:
                assert is_right[job.params.structured_outputs](text)
            assert reason == "stop" or len(tokens) == job.params.max_tokens or len(job.prompt) + len(tokens) >= 64
