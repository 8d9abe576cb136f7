"""Documents agree with the code."""

import os
import re

import troupe
from conftest import ROOT
from troupe import _config


def read(name):
    with open(os.path.join(ROOT, "docs", name)) as f:
        return f.read()


def test_the_table_of_worker_settings_is_complete_and_has_the_defaults():
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| [^|]*\| [^|]*\| `([^`]*)`[^|]*\|$", read("python.md").partition("## Futures")[0], re.M
        )
    )
    defaults = {**dict.fromkeys(_config.FIELDS), **(troupe.WorkerConfig.__init__.__kwdefaults__ or {}), "name": ""}
    assert set(rows) == set(_config.FIELDS)
    assert {field: eval(text) for field, text in rows.items()} == defaults


def test_every_dispatch_mode_has_a_section_with_a_diagram():
    sections = re.findall(r"^## ([A-Z_]+)\n(?:[^#]*?)```\n.+?```", read("dispatch.md"), re.M | re.S)
    assert sections == [m.value for m in troupe.Dispatch]


def test_every_row_of_from_ray_says_what_to_write():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", read("from-ray.md"), re.M)
    rows = [
        (theirs, ours) for theirs, ours in rows if theirs not in ("Ray", "ROLL", "---") and not set(theirs) <= set("-|")
    ]
    assert len(rows) > 40
    for theirs, ours in rows:
        assert "`" in ours or ours.startswith(
            ("the same", "works", "taken as it is", "the workers are told", "short of nodes")
        ), (theirs, ours)
    for name in set(re.findall(r"\btroupe\.([A-Za-z_]+)\b", read("from-ray.md"))):
        assert hasattr(troupe, name) or name == "ray", name
