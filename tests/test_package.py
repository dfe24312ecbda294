"""The package as a newcomer meets it."""

import re
import subprocess
import sys
from pathlib import Path

import scoff

ROOT = Path(__file__).parent.parent


def test_import_needs_torch_alone():
    code = (
        "import sys\n"
        "for name in ('tqdm', 'matplotlib', 'hypothesis', 'pytest'): sys.modules[name] = None\n"
        "import scoff, torch\n"
        "scoff.SCOFF(3, 8)(torch.zeros(2, 1, 3))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_exported_exists():
    assert all(hasattr(scoff, name) for name in scoff.__all__)
    assert (Path(scoff.__file__).parent / "py.typed").exists()


def test_the_changelog_knows_the_version():
    assert scoff.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_pinned_can_be_had_everywhere():
    """Once each; builds such as 2.13.0+cpu are in few indices."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", pin) for pin in pins)
    names = [pin.split("==")[0].lower() for pin in pins]
    assert len(set(names)) == len(names)


def test_the_readmes_example_runs():
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    code = "\n".join(block.split("```")[0] for block in blocks)
    assert "scoff.SCOFF" in code
    subprocess.run([sys.executable, "-c", code], check=True)
