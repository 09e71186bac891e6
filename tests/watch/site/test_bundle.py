"""The page's modules as one script."""

from __future__ import annotations

import pytest

from verl_server.watch.site.bundle import BundleError, bundled

MAIN = """\
import { one,
  two } from "./a.js";
import { three } from "./in/b.js";
export const main = one + two + three;
"""
A = 'import { three } from "./in/b.js";\nexport function one() {}\nexport const two = three;\n'
B = "export class three {}\nconst inner = 1;\n"


def test_modules_come_after_what_they_import() -> None:
    script = bundled({"js/main.js": MAIN, "js/a.js": A, "js/in/b.js": B, "js/unused.js": "x"}, "js/main.js")
    assert "import" not in script and "export" not in script and "unused" not in script
    assert script.index("class three") < script.index("function one") < script.index("const main")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"js/a.js": 'import { main } from "./main.js";'}, "circle"),
        ({"js/a.js": A + "const inner = 2;\n"}, "inner is on the top level of"),
        ({"js/a.js": "export default 1;\n"}, "no import or export"),
        ({"js/a.js": 'import * as b from "./in/b.js";\n'}, "no import or export"),
        ({"js/a.js": 'import { three as four } from "./in/b.js";\n'}, "renames"),
        ({"js/a.js": 'import { five } from "./five.js";\n'}, r"five\.js, which does not exist"),
    ],
)
def test_a_module_that_breaks_a_rule_is_refused(changed: dict[str, str], fault: str) -> None:
    with pytest.raises(BundleError, match=fault):
        bundled({"js/main.js": MAIN, "js/a.js": A, "js/in/b.js": B} | changed, "js/main.js")
