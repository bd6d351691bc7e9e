import os
from pathlib import Path

import pytest

from replication.story import files, play


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
def test_story(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    heard = play(text)
    if os.environ.get("WALSTREAM_REWRITE"):
        file.write_text(heard, encoding="utf-8")
    assert heard == (heard if os.environ.get("WALSTREAM_REWRITE") else text)


def test_there_are_stories() -> None:
    assert len(files()) > 15
