"""SGLang's own tests of its server, `sglang/test/kits` of its wheel, against a server with SmolLM2-135M-Instruct.

Each class mixes one of the kits in and gives it what it needs: the server, and sizes that two cores manage. No text of
the kits is here. `NOT_PASSED` lists every test that fails, and `NOT_RUN` those that are not started, with the reasons.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ["NO_PROXY"] = "*"

import aiohttp
import openai
import pytest
import requests
from conftest import Server
from sglang_kits import import_kits, tokenizer_of

(
    abort,
    anthropic,
    contract,
    correctness,
    stress,
    ebnf,
    json_schema,
    json_mode,
    kl_divergence,
    matched_stop,
    pause,
    branching,
    radix_cache,
    reasoning,
    regex,
    spec,
    streaming,
    unified,
    kl_utils,
    spec_fixture,
    streaming_fixture,
) = import_kits(
    "kits.abort_timeout_kit",
    "kits.anthropic_messages_kit",
    "kits.basic_api_contract_kit",
    "kits.basic_decode_correctness_kit",
    "kits.basic_scheduler_stress_kit",
    "kits.ebnf_constrained_kit",
    "kits.json_constrained_kit",
    "kits.json_mode_kit",
    "kits.kl_divergence_kit",
    "kits.matched_stop_kit",
    "kits.pause_generation_kit",
    "kits.prefix_cache_branching_kit",
    "kits.radix_cache_server_kit",
    "kits.reasoning_kit",
    "kits.regex_constrained_kit",
    "kits.spec_server_kits",
    "kits.streaming_session_kit",
    "kits.unified_radix_cache_kit",
    "kl_test_utils",
    "server_fixtures.spec_eagle_fixture",
    "server_fixtures.streaming_session_fixture",
)

KEY = "EMPTY"
"""The server's key. Sessions need one, and this one is what some kits send; `sizes` adds it to the others' requests."""
pytestmark = pytest.mark.client("SGLang's test kits", "sglang")


@dataclass(frozen=True)
class Expected:
    """Why a test of a kit does not pass."""

    kind: Literal["refused", "not implemented", "served here", "another model", "SGLang's own code"]
    why: str
    says: str
    """A regular expression for the failure's text: another failure is a fault."""
    may_pass: bool = False
    """True if the outcome depends on what this small model happens to sample."""


ENDLESS = "the schema or pattern permits a number or a word of any length, and SmolLM2 may write on until it is cut"
THINKING = "needs a model that thinks; SmolLM2 writes no reasoning"
LONG = "asks for 100,000 tokens, and SmolLM2 has a context of 8,192"
SPECULATION = "counts what a speculative decoder accepts, and there is none"

NOT_PASSED: dict[str, Expected] = {
    "WaitingTimeoutMixin.test_waiting_timeout": Expected(
        "not implemented", "a limit of the time in the queue (SGLANG_REQ_WAITING_TIMEOUT)", "0 != 1"
    ),
    "AnthropicMessagesMixin.test_count_tokens_with_system": Expected(
        "another model",
        "SmolLM2's template has a system prompt of its own, which is longer than the kit's",
        "not greater",
    ),
    "AnthropicMessagesMixin.test_tool_result_image_content_conversion": Expected(
        "SGLang's own code", "calls a function of SGLang's and no server", "AnthropicMessagesRequest of SGLang's engine"
    ),
    "BasicDecodeCorrectnessMixin.test_basic_math": Expected("another model", "17 times 23", "'391' not found"),
    "BasicSchedulerStressMixin.test_concurrent_requests": Expected(
        "another model", "SmolLM2 ends its answer at once after the kit's prompt", "concurrent answers correct"
    ),
    "EBNFConstrainedMixin.test_ebnf_generate_complex_json": Expected(
        "another model",
        "the grammar permits fewer pairs than the kit expects, and SmolLM2 may write fewer",
        "does not match any of the allowed patterns",
        may_pass=True,
    ),
    "JSONConstrainedMixin.test_json_generate": Expected("another model", ENDLESS, "JSONDecodeError", may_pass=True),
    "JSONConstrainedMixin.test_mix_json_and_other": Expected(
        "another model", ENDLESS, "JSONDecodeError", may_pass=True
    ),
    "RegexConstrainedMixin.test_regex_generate_custom_log_format": Expected(
        "another model", ENDLESS, "does not match regex pattern", may_pass=True
    ),
    "PrefixCacheBranchingMixin.test_prefix_cache_branching": Expected(
        "not implemented",
        "the coarse prefix cache of Mamba layers; here the second request finds the prefix already",
        r"i=1, cache_hit=False, cached_tokens=\d+ is not 0",
    ),
    "ReasoningTokenUsageMixin.test_reasoning_tokens_generate_exact_count": Expected(
        "refused", "`require_reasoning`: reasoning is not enforced; open it in the prompt", "`require_reasoning`"
    ),
    "ReasoningTokenUsageMixin.test_reasoning_tokens_thinking": Expected(
        "another model", THINKING, "not greater than 0"
    ),
    "ReasoningTokenUsageMixin.test_reasoning_tokens_thinking_stream": Expected(
        "another model", THINKING, "not greater than 0"
    ),
    "SeparateReasoningMixin.test_nonstreaming_separate_reasoning_true": Expected("another model", THINKING, "no len"),
    "SeparateReasoningMixin.test_streaming_separate_reasoning_true": Expected(
        "another model", THINKING, "not greater than 0"
    ),
    "SeparateReasoningMixin.test_streaming_separate_reasoning_true_stream_reasoning_false": Expected(
        "another model", THINKING, "no len"
    ),
    "SpecGrammarKit.test_grammar_structured_output_no_trailing_tokens": Expected(
        "not implemented", SPECULATION, "spec_verify_ct"
    ),
    "SpecGrammarKit.test_grammar_logprob_count_matches_completion_tokens": Expected(
        "not implemented", SPECULATION, "spec_verify_ct"
    ),
    "StreamingSessionKitMixin.test_first_mid_abort_recovery": Expected("another model", LONG, "KeyError: 'meta_info'"),
    "StreamingSessionKitMixin.test_nth_mid_abort_recovery": Expected("another model", LONG, "KeyError: 'meta_info'"),
    "StreamingSessionKitMixin.test_leak_logprob_concurrent": Expected(
        "refused",
        "log-probabilities of the prompt in a session, whose prompts are built from stored tokens",
        "log-probabilities of the prompt are not available in a session",
    ),
    "StreamingSessionKitMixin.test_preabort_recovery": Expected(
        "served here", "an `offset` in a streaming session, which SGLang refuses", "must equal turn_1_total"
    ),
    "SpecHiddenStatesKit.test_return_hidden_states": Expected(
        "refused", "`return_hidden_states`: this server returns tokens and log-probabilities only", "400 != 200"
    ),
}
"""KIT.test -> why it fails. A test that passes nevertheless, or fails otherwise, fails this suite."""

NOT_RUN = {
    "MMLUSanityMixin": "needs a data set of the hub",
    "GSM8KMixin": "needs a data set of the hub",
    "MMLUMixin": "needs a data set of the hub",
    "MMMUProMixin": "needs images, and a data set of the hub",
    "HumanEvalMixin": "needs a data set of the hub",
    "MGSMEnMixin": "needs a data set of the hub",
    "FwdOccupancyMixin": "needs a GPU, and SGLang's gauge of its occupancy",
    "LMEvalMixin": "needs a data set of the hub",
    "MMMUMixin": "needs images, and a data set of the hub",
    "PDLogprobParityMixin": "needs a server whose prefill and decode are two servers",
    "SpecDecodingMixin": "needs a GPU and a speculative decoder",
    "SpecParityKit": "launches SGLang, and compares it with its speculative decoder",
    "SpecAccuracyKit": "needs a data set of the hub",
    "SpecPerfKit": "needs a data set of the hub",
    "AccuracyTwoPassMixin": "needs a data set of the hub, and a cache on disk",
    "SpecCorrectnessKit.test_acc_length": f"not implemented: {SPECULATION}",
    "SpecFeatureKit.test_constrained_decoding": (
        "another model: SmolLM2 repeats a list until its context is full, which takes minutes; JSONModeMixin asks for "
        "the same with a bound"
    ),
    "UnifiedRadixTreeTestMixin.test_gsm8k": "needs a data set of the hub",
    "RunningTimeoutTwoWaveMixin.test_running_timeout_no_crash": (
        "not implemented: a limit of the time that a request runs (SGLANG_REQ_RUNNING_TIMEOUT)"
    ),
}
"""KIT or KIT.test -> why it is not started."""


class Kit(unittest.TestCase):
    """The attributes that the kits read: the server, its process, the model's folder, and a tokenizer."""

    base_url: str
    process: Any
    model: str
    api_key = KEY
    tokenizer: Any
    client: openai.Client
    mixin: type

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in names_of_tests(cls):
            full = f"{cls.__name__}.{name}"
            if full in NOT_RUN:
                setattr(cls, name, pytest.mark.skip(NOT_RUN[full])(getattr(cls, name)))
            elif full in NOT_PASSED:
                setattr(cls, name, failing(getattr(cls, name), NOT_PASSED[full]))


def names_of_tests(cls: type) -> list[str]:
    return [name for name in dir(cls) if name.startswith("test_")]


def failing(test: Callable[..., None], expected: Expected) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any) -> None:
        try:
            test() if inspect.ismethod(test) else test(*args)  # a class method is bound already
        except Exception as error:
            if not re.search(expected.says, f"{type(error).__name__}: {error}", re.DOTALL):
                raise
            pytest.xfail(f"{expected.kind}: {expected.why}")
        if not expected.may_pass:
            pytest.fail("passes, although NOT_PASSED lists it: remove the entry")

    return run


@pytest.fixture(scope="session")
def folder() -> Path:
    """The model's folder, which is made once for each environment, because that takes most of a minute."""
    path = Path(sys.prefix) / "smollm2"
    if not path.exists():
        from examples.real_model import make_real_model

        new = path.with_name("smollm2.new")
        make_real_model(new)
        new.rename(path)
    return path


@pytest.fixture(scope="session")
def real_server(folder: Path, make_server: Callable[..., Server]) -> Server:
    return make_server(model_path=str(folder), kv_cache_gib=1.0, page_size=1, random_seed=0, api_key=KEY)


@pytest.fixture(scope="session")
def short_server(folder: Path, make_server: Callable[..., Server]) -> Server:
    """A server with the short context of the kit about aborts."""
    return make_server(model_path=str(folder), context_length=streaming_fixture.ABORT_REPRO_CONTEXT_LEN, api_key=KEY)


@pytest.fixture(scope="class", autouse=True)
def serve(request: pytest.FixtureRequest) -> None:
    kit: Any = request.cls
    if kit is None:
        return
    server: Server = request.getfixturevalue("short_server" if kit is AbortLeakReproKitMixin else "real_server")
    kit.base_url, kit.process, kit.model = server.url, server.process, server.model
    kit.tokenizer = tokenizer_of(server.model)
    kit.client = openai.Client(api_key=kit.api_key, base_url=f"{server.url}/v1")


class AbortAllMixin(abort.AbortAllMixin, Kit):
    abort_all_num_requests = 16
    abort_all_max_new_tokens = 4000


class WaitingTimeoutMixin(abort.WaitingTimeoutMixin, Kit):
    waiting_timeout_max_new_tokens = 16


class RunningTimeoutTwoWaveMixin(abort.RunningTimeoutTwoWaveMixin, Kit):
    pass


class AnthropicMessagesMixin(anthropic.AnthropicMessagesMixin, Kit):
    pass


class BasicAPIContractMixin(contract.BasicAPIContractMixin, Kit):
    pass


class BasicDecodeCorrectnessMixin(correctness.BasicDecodeCorrectnessMixin, Kit):
    pass


class BasicSchedulerStressMixin(stress.BasicSchedulerStressMixin, Kit):
    pass


class EBNFConstrainedMixin(ebnf.EBNFConstrainedMixin, Kit):
    pass


class JSONConstrainedMixin(json_schema.JSONConstrainedMixin, Kit):
    pass


class JSONModeMixin(json_mode.JSONModeMixin, Kit):
    pass


class KLDivergenceMixin(kl_divergence.KLDivergenceMixin, Kit):
    kl_div_thres = 0.001
    kl_div_max_samples = 4
    kl_div_prefill_max_new_tokens = 64
    kl_div_decode_max_new_tokens = 64


class MatchedStopMixin(matched_stop.MatchedStopMixin, Kit):
    pass


class PauseResumeInPlaceMixin(pause.PauseResumeInPlaceMixin, Kit):
    pause_num_requests = 8
    pause_max_new_tokens = 128
    pause_duration = 2
    pause_ignore_eos = True


class PrefixCacheBranchingMixin(branching.PrefixCacheBranchingMixin, Kit):
    cache_chunk_size = 64

    @classmethod
    def flush_cache(cls) -> None:
        kl_utils._flush_cache(cls.base_url)


class ReasoningTokenUsageMixin(reasoning.ReasoningTokenUsageMixin, Kit):
    pass


class SeparateReasoningMixin(reasoning.SeparateReasoningMixin, Kit):
    pass


class RegexConstrainedMixin(regex.RegexConstrainedMixin, Kit):
    pass


class SpecCorrectnessKit(spec.SpecCorrectnessKit, Kit):
    pass


class SpecLogprobKit(spec.SpecLogprobKit, Kit):
    pass


class SpecPenaltyKit(spec.SpecPenaltyKit, Kit):
    run_decode = spec_fixture.SpecEagleServerBase.run_decode


class SpecFeatureKit(spec.SpecFeatureKit, Kit):
    send_request = spec_fixture.SpecEagleServerBase.send_request
    send_requests_abort = spec_fixture.SpecEagleServerBase.send_requests_abort


class SpecHiddenStatesKit(spec.SpecHiddenStatesKit, Kit):
    pass


class SpecGrammarKit(spec.SpecGrammarKit, Kit):
    pass


class SpecSamplingMaskKit(spec.SpecSamplingMaskKit, Kit):
    pass


class StreamingSessionKitMixin(streaming.StreamingSessionKitMixin, Kit):
    pass


class AbortLeakReproKitMixin(streaming.AbortLeakReproKitMixin, Kit):
    pass


class UnifiedRadixTreeTestMixin(unified.UnifiedRadixTreeTestMixin, Kit):
    max_new_tokens = 32
    num_groups = 1
    branches_per_group = 2
    prefix_len = 128


COLORS = "<|im_start|>user\nName three colors, each with a sentence.<|im_end|>\n<|im_start|>assistant\n"
"""A prompt after which SmolLM2 ends its answer before the kit's limit of 1,024 tokens."""
STREAMING_SIZES = {
    "ABORT_REPRO_ROUNDS": 2,
    "CONCURRENT_LOGPROB_ROUNDS": 1,
    "CONCURRENT_LOGPROB_TURNS": 3,
    "STRESS_NUM_SESSIONS": 4,
    "STRESS_NUM_NON_STREAMING": 2,
    "STRESS_NUM_TURNS": 3,
}


@pytest.fixture(scope="session", autouse=True)
def sizes(folder: Path) -> Iterator[None]:
    """Sizes that the kits keep in their modules, and prompts in place of those that they download."""
    text = (Path(kl_utils.__file__).parent / "long_prompt.txt").read_text()
    ids = tokenizer_of(str(folder)).encode(text)
    prompts = [ids[start : start + 200] for start in range(0, 1600, 200)]
    UnifiedRadixTreeTestMixin.input_ids = prompts[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kl_utils, "get_input_ids", lambda **options: prompts)
        nodes = functools.partial(radix_cache.gen_radix_tree, num_nodes=16, chunk_len=32)
        patch.setattr(spec_fixture, "PROMPTS", [COLORS])
        check, longest = spec.run_logprob_check, 500
        patch.setattr(spec, "run_logprob_check", lambda kit, sizes: check(kit, sizes) if sizes[0] <= longest else None)
        suffixes = unified._random_suffixes
        patch.setattr(unified, "_random_suffixes", lambda n, length, seed: suffixes(n, length // 4, seed))
        for name, size in STREAMING_SIZES.items():
            patch.setattr(streaming_fixture, name, size)
        patch.setattr(radix_cache, "gen_radix_tree", nodes)
        header = {"Authorization": f"Bearer {KEY}"}
        headers = requests.structures.CaseInsensitiveDict(requests.utils.default_headers(), **header)
        patch.setattr(requests.sessions, "default_headers", headers.copy)
        patch.setattr(aiohttp, "ClientSession", functools.partial(aiohttp.ClientSession, headers=header))
        yield


def shipped_tests() -> set[str]:
    """Return KIT.test for every test in the kits of the wheel."""
    found = set()
    for file in Path(abort.__file__).parent.rglob("*.py"):
        for kit in ast.parse(file.read_text()).body:
            if isinstance(kit, ast.ClassDef):
                functions = [node.name for node in kit.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
                found |= {f"{kit.name}.{name}" for name in functions if name.startswith("test_")}
    return found


SHIPPED = shipped_tests()
MIXED_IN = {f"{kit.__name__}.{name}" for kit in Kit.__subclasses__() for name in names_of_tests(kit)}
LISTED = {*NOT_PASSED, *(name for name in NOT_RUN if "." in name)}


@pytest.mark.parametrize("test", sorted((SHIPPED | LISTED) - MIXED_IN))
def test_kits_that_are_not_mixed_in(test: str, record_property: Callable[[str, str], None]) -> None:
    """Every test of the kits is run or has a reason, and every reason is for a test of the kits."""
    record_property("exercised", test)
    assert test in SHIPPED, "NOT_PASSED or NOT_RUN lists a test that no kit has: remove the entry"
    kit = test.partition(".")[0]
    assert kit in NOT_RUN, f"mix {kit} in, or list it in NOT_RUN"
    pytest.skip(NOT_RUN[kit])
