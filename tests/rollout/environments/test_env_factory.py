"""A name on the command line becomes a checked factory, or one error that explains why it cannot."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_server.errors import BadRequestError
from verl_server.rollout.environments.env_factory import load_factory

_MODULE = '''
import abc

THING = {"not": "a factory"}

class Good:
    """Plays."""
    action_schema = {"type": "object"}
    def __init__(self, words=3): self.words = words
    def reset(self, seed=None): return {"text": str(self.words)}
    def step(self, action): return {"text": ""}, 1.0, True

class NoStep:
    def reset(self, seed=None): return {}

class NeedsWords(Good):
    def __init__(self, words, /, *, size): super().__init__(words)

class NeedsSize(Good):
    def __init__(self, *, size): super().__init__()

class Unseeded(Good):
    def reset(self): return {}

def make(words=5):
    return Good(words)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a current folder that contains modules of environments.

    The modules have names that no other test uses, because modules stay imported.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "factory_envs.py").write_text(_MODULE)
    (tmp_path / "factory_broken.py").write_text("x = 1\nraise RuntimeError('no dice')\n")
    (tmp_path / "factory_syntax.py").write_text("def (:\n")
    (tmp_path / "factory_needs.py").write_text("import no_such_dependency_of_ours\n")
    monkeypatch.delitem(sys.modules, "factory_envs", raising=False)
    return tmp_path


def test_a_class_or_a_function_from_the_current_folder(folder: Path) -> None:
    assert load_factory("factory_envs:Good")().words == 3
    assert load_factory("factory_envs:make")().words == 5
    bound: Any = load_factory("factory_envs:Good", {"words": 7})
    assert bound().words == 7
    assert (bound.__name__, bound.__doc__, bound.action_schema) == ("Good", "Plays.", {"type": "object"})


def test_a_file_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert load_factory(f"{folder}/factory_envs.py:Good")().words == 3
    assert load_factory("../factory_envs.py:Good")().words == 3


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("factory_envs", {}, "MODULE:CLASS or FILE.py:CLASS, not 'factory_envs'"),
        ("factory_envs:", {}, "MODULE:CLASS"),
        ("no_such_module:X", {}, r"no module 'no_such_module' in the current folder \(.*name its file"),
        ("json.no_such_module:X", {}, "no module 'json.no_such_module'"),
        ("no_such_file.py:X", {}, "There is no file no_such_file.py"),
        ("factory_broken:X", {}, r"RuntimeError: no dice\. Raised at .*factory_broken.py:2\."),
        ("factory_syntax:X", {}, "factory_syntax cannot be imported: SyntaxError: .*factory_syntax.py, line 1"),
        ("factory_needs:X", {}, r"No module named 'no_such_dependency_of_ours'\. Raised at .*factory_needs.py:1"),
        ("factory_envs:god", {}, r"factory_envs.py\) has no 'god'\. Environment classes in it: Good, Needs"),
        ("factory_envs:THING", {}, "factory_envs:THING is a dict, not a class or a function"),
        ("factory_envs:NoStep", {}, r"factory_envs:NoStep has no method step\(action\)"),
        ("factory_envs:NeedsSize", {}, r"NeedsSize\(\*, size\).*missing a required .*'size'.*--kwargs"),
        ("factory_envs:Good", {"word": 1}, "unexpected keyword argument 'word'"),
    ],
)
def test_one_clear_error(folder: Path, name: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        load_factory(name, kwargs)


def test_a_reset_without_a_seed_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_factory("factory_envs:Unseeded")
    assert "factory_envs:Unseeded.reset takes no `seed`" in caplog.text
