"""The README's Python blocks run, top to bottom, as one program."""
import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def test_python_blocks_of_the_readme_run():
    names = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, "README.md block %d" % number, "exec"), names)


def test_readme_has_its_example_and_its_two_commands():
    assert BLOCKS and "make train" in README and "make test" in README


def test_example_says_what_it_promises():
    # The first block is the one a newcomer copies: at most ten lines of code beside the model.
    assert "TowerBuilder" in BLOCKS[0] and "minimize" in BLOCKS[0]
