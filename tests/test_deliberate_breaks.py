"""Tests of `make test` fail when an invariant of the design is broken on purpose in a copy of the code.

A break replaces one passage of one module. If the passage no longer exists, the test of the break fails, too, and the
break must be adapted to the changed module. Every break names the tests that should catch it, so that a run takes
seconds, and what the first of them to fail says then: a break that only raises an error of its own, such as an
AttributeError, breaks no invariant. All of these tests are part of `make test`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Break:
    invariant: str
    module: str
    """Path of the module below the package."""
    old: str
    """Passage that occurs exactly once in the module."""
    new: str
    tests: str
    """Test files, or single tests, that must fail with the break."""
    failure: str
    """Regular expression of the lines in which pytest explains the first failure."""


BREAKS = [
    Break(
        "one owner",
        "server/loop_thread.py",
        "        if threading.current_thread() is self._thread:\n            coro.close()\n",
        "        if False:\n            coro.close()\n",
        "tests/server/test_tokenizer_manager.py",
        r"No answer from the engine's event loop within",
    ),
    Break(
        "one terminal reply",
        "scheduler/scheduler.py",
        "        self._output.add(req, reason, [], [])\n",
        "",
        "tests/scheduler/test_scheduler.py",
        r"assert \['running', .*\] == \['first', 'ru",
    ),
    Break(
        "weights stay in place",
        "worker/weights/weight_updater.py",
        "                update.commit()\n",
        "                update.commit()\n"
        "                for parameter in self._model.model.parameters():\n"
        "                    parameter.data = parameter.data.clone()\n",
        "tests/worker/weights/test_weights_in_place.py",
        r"AssertionError: a push moved parameters",
    ),
    Break(
        "exactly old or new or 503",
        "worker/weights/weight_updater.py",
        '        self.state, self._torn_by = "torn", reason\n',
        "        self._torn_by = reason\n",
        "tests/worker/weights/test_weight_updater.py",
        r"assert \(False, 500, 'serving', 1\) == \(False, 500, 'torn', 1\)",
    ),
    Break(
        "no token violates a demand on the version: at a push",
        "scheduler/control/version_border.py",
        "in self._scheduler.demands():\n",
        "in list[tuple[str, str]]():\n",
        "tests/scheduler/test_scheduler_versions.py",
        r"assert \('length', None, None, False\) == \('abort', 409",
    ),
    Break(
        "no token violates a demand on the version: on arrival",
        "scheduler/scheduler.py",
        "self.control.border.refusal(message.weight_demand)",
        'self.control.border.refusal("")',
        "tests/scheduler/test_scheduler_versions.py::test_an_arrival_is_judged_by_the_version_of_now",
        r"{'exact': \('length', None, None, False\)} != {'exact': \('abort', 409",
    ),
    Break(
        "an update is whole",
        "worker/weights/weight_sources.py",
        "        return req.partial\n    is_described",
        "        return req.partial\n    return True\n    is_described",
        "tests/worker/weights/test_whole_updates.py",
        r"assert \(True, 200\) == \(False, 400\)",
    ),
    Break(
        "a transaction is whole",
        "worker/weights/transaction.py",
        "self.failed or (self.full and not partial)",
        "self.failed",
        "tests/worker/weights/test_transaction.py",
        r"assert \(200 == 400",
    ),
    Break(
        "nothing is sampled from NaN",
        "worker/weights/weight_updater.py",
        "            nonfinite = update.nonfinite()\n",
        "            nonfinite = []\n",
        "tests/worker/weights/test_nonfinite_weights.py",
        r"assert \(True, 200\) == \(False, 400\)",
    ),
    Break(
        "pages of one version",
        "scheduler/batch_planner.py",
        "            req.restarted = True\n        self.cache.start_version()\n",
        "            req.restarted = True\n",
        "tests/scheduler/test_scheduler_control.py",
        r"assert \[\d+, .*\] == \[\d+, ",
    ),
    Break(
        "ordered at the source",
        "engine/rank_group.py",
        "        payloads = self.gather(what, prepare)\n",
        "        payloads = [prepare()] * self.size if self.rank else self.gather(what, prepare)\n",
        "tests/engine/test_rank_timeout.py tests/engine/test_joint_ranks.py tests/engine/test_verl_engine.py",
        r"AssertionError: rank 0: Traceback",
    ),
    Break(
        "collective errors",
        "worker/agreement.py",
        "    if failed:\n",
        "    if tp.rank in failed:\n",
        "tests/worker tests/parity/test_tensor_parallel.py",
        r"test_one_number_on_one_rank_is_enough",
    ),
    Break(
        "no code from the wire",
        "weight_sync/pickle_reader.py",
        "        if key not in self._known:\n",
        "        if module == 'builtins':\n            return Function(getattr(__import__(module), name))\n"
        "        if key not in self._known:\n",
        "tests/weight_sync/sglang/test_payloads.py",
        r"is not allowed' in \"'w' is not a tensor",
    ),
    Break(
        "nothing ignored in silence",
        "server/generate_request.py",
        "            if name in given and not _is_unset(given[name]):\n",
        "            if False:\n",
        "tests/server/test_generate_request.py",
        r"DID NOT RAISE BadRequestError",
    ),
    Break(
        "independent draws",
        "scheduler/scheduler.py",
        "self._seeds = random.Random(server_args.random_seed)",
        "self._seeds = random.Random(0)",
        "tests/scheduler tests/engine/test_seeds.py",
        r"test_every_request_has_a_seed_its_own_or_one_of_the_engine",
    ),
    Break(
        "no request stalls the others",
        "server/limits.py",
        "        if count > (most := getattr(self, setting)):\n",
        "        if count > (most := getattr(self, setting)) < 0:\n",
        "tests/server/test_limits.py",
        r"assert \(?200 == 400",
    ),
    Break(
        "control routes need the admin key",
        "server/auth.py",
        '            case "control":\n',
        '            case "controls":\n',
        "tests/server/test_auth.py",
        r"assert 200 == 401",
    ),
    Break(
        "every page has one owner",
        "scheduler/batch_planner.py",
        "        self.pages.free(req.pages[req.num_shared :])\n",
        "        self.pages.free(req.pages[req.num_shared + 1 :])\n",
        "tests/scheduler/test_scheduler.py",
        r"AssertionError: free=\d+ \+ cached=\d+ \+ used=\d+ != 64",
    ),
    Break(
        "an agent names no other session",
        "server/sessions/session_turns.py",
        "return_logprob=True, session_id=None, conversation_id=None)",
        "return_logprob=True)",
        "tests/server/sessions/test_scheduling.py",
        r"assert \['hint:ses_\w+.*\] == \['ses_",
    ),
    Break(
        "what is trained is the policy",
        "sampling/sampler.py",
        "        unedited = None if edited is None else logits.index_select(0, edited.index)\n",
        "        unedited = None if edited is None else 0.5 * logits.index_select(0, edited.index)\n",
        "tests/sampling/test_policy_logprobs.py",
        r"assert -\d\.\d+ == -\d\.\d+ ± 1\.0e-05",
    ),
    Break(
        "what is trained had a choice",
        "train/batches.py",
        "    mask = torch.tensor(trajectory.trained_mask, dtype=torch.bool)\n",
        "    mask = torch.tensor(trajectory.loss_mask, dtype=torch.bool)\n",
        "tests/train/test_edited_sampling.py::test_turns_of_different_records_share_the_columns",
        r"assert \(\[-2\.0, -3\.0, -0\.5\] == \[-3\.0, -0\.5\]",
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    for name in ("verl_server", "tests", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not exhaustive", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("VERL_SERVER_TEST_")}
    env["PYTHONPATH"] = str(copy)
    return subprocess.run([*command, *tests], cwd=copy, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_copy_passes_as_it_is(copy: Path) -> None:
    """The unchanged copy passes. Otherwise a test could fail in the copy for another reason than the break."""
    done = run_tests(copy, sorted({test for broken in BREAKS for test in broken.tests.split()}))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-500:]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.invariant.replace(" ", "-"))
def test_a_broken_invariant_is_noticed(copy: Path, broken: Break) -> None:
    module = copy / "verl_server" / broken.module
    whole = module.read_text()
    assert whole.count(broken.old) == 1, f"{broken.module} changed: adapt the break of '{broken.invariant}' to it"
    module.write_text(whole.replace(broken.old, broken.new))
    try:
        done = run_tests(copy, broken.tests.split())
    finally:
        module.write_text(whole)
    assert done.returncode == 1, (
        f"no test failed (exit code {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-500:]}"
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED"))]
    assert any(re.search(broken.failure, line) for line in told), (
        f"a test failed, but not because of this break (/{broken.failure}/):\n" + "\n".join(told)[:2000]
    )
