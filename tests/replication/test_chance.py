import os

import pytest

from replication.chance import Chance

ROUNDS = 3_000 if os.environ.get("WALSTREAM_TEST_ROUNDS") == "full" else 300


@pytest.mark.parametrize("first", range(0, ROUNDS, 100))
def test_no_story_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            Chance(seed).play(600)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
