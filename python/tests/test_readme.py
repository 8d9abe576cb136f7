"""The program in the README is tried as it stands there."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_program_in_the_readme(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "README.md").read_text()
    program = text.split("```python\n", 1)[1].split("```", 1)[0]
    script = tmp_path / "readme.py"
    script.write_text(program)
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert (
        out.stdout.strip()
        == "['a=1 by rank 0', 'few=3 by rank 0', 'short=5 by rank 0', 'texts=5 by rank 2', '.=1 by rank 2']"
    )
