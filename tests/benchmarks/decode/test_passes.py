"""Which passes of the decoding benchmark count."""

from tests.benchmarks.decode.passes import PROMPT_TOKENS, Pass, filling_left, steady, together


def one(decoding: int, prompt_tokens: int = 0, seconds: float = 1.0) -> Pass:
    return Pass(decoding=decoding, prompt_tokens=prompt_tokens, seconds=seconds)


def test_filling_and_the_first_passes_after_it_are_left_out() -> None:
    passes = [one(0, 1024), one(32, 1024), one(64), one(64), one(64, seconds=2.0), one(64)]
    assert [p.seconds for p in steady(passes, 64)] == [2.0, 1.0]


def test_passes_with_riders_are_told_from_those_without() -> None:
    passes = [one(64), one(64), one(64, 256), one(66), one(64, 256), one(66), one(20)]
    assert steady(passes, 64) == [one(66), one(66)]
    assert steady(passes, 64, 256) == [one(64, 256), one(64, 256)]


def test_filling_makes_room_for_those_that_decode() -> None:
    # 64 tokens; 62 beside the two that decode; then 2 are left, beside three.
    assert filling_left(4, 64) == [0, 0, 59]


def test_riders_come_in_all_at_once() -> None:
    for sequences in (16, 100, 512, 1024):
        tokens = together(sequences, 1024, sequences + 1024)
        left = filling_left(sequences, tokens)
        assert left[-1] == 0 or left[-1] >= 1024
        assert tokens - sequences - 1024 < 1024 + PROMPT_TOKENS
