"""Tasks about numbers: sums, number words, Roman numerals, the largest of a list."""

from random import Random
from typing import Final

from demo.kind import Kind, Question
from demo.words import listed

_SMALL: Final = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS: Final = listed("twenty thirty forty fifty sixty seventy eighty ninety")
_ROMAN_DIGITS: Final = (
    ("", "M", "MM", "MMM"),
    ("", "C", "CC", "CCC", "CD", "D", "DC", "DCC", "DCCC", "CM"),
    ("", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC"),
    ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"),
)
_ROMAN_VALUES: Final = {
    "M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50,
    "XL": 40, "X": 10, "IX": 9, "V": 5, "IV": 4, "I": 1,
}  # fmt: skip


def number_words(number: int) -> str:
    """English words of a number of 0..9999, such as "two thousand forty-one"."""
    assert 0 <= number < 10_000, f"no words for {number}"
    parts = []
    if number >= 1000:
        parts += [_SMALL[number // 1000], "thousand"]
    if number % 1000 >= 100:
        parts += [_SMALL[number % 1000 // 100], "hundred"]
    rest = number % 100
    if rest >= 20:
        tens = _TENS[rest // 10 - 2]
        parts.append(f"{tens}-{_SMALL[rest % 10]}" if rest % 10 else tens)
    elif rest or not number:
        parts.append(_SMALL[rest])
    return " ".join(parts)


def number_of_words(words: str) -> int:
    """The number that English words of 0..9999 stand for."""
    total = 0
    for word in words.replace("-", " ").split():
        if word == "thousand":
            total *= 1000
        elif word == "hundred":
            total += total % 10 * 99  # the digit just read was added as ones
        elif word in _TENS:
            total += 10 * (_TENS.index(word) + 2)
        else:
            total += _SMALL.index(word)
    return total


def roman(number: int) -> str:
    """Roman numeral of 1..3999, greedy over the values of its signs."""
    signs = ""
    for sign, value in _ROMAN_VALUES.items():
        count, number = divmod(number, value)
        signs += sign * count
    return signs


def _draw_size(rng: Random, most_digits: int) -> int:
    """A number whose count of digits is uniform, so that short ones are not rare."""
    return rng.randrange(10 ** rng.randint(1, most_digits))


def _draw_addition(rng: Random) -> Question:
    left, right = _draw_size(rng, 3), _draw_size(rng, 3)
    return Question(subject=f"{left} + {right}", answer=str(left + right))


def _solve_addition(subject: str) -> str:
    return str(sum(int(part) for part in subject.split(" + ")))


def _draw_to_words(rng: Random) -> Question:
    number = rng.randrange(10 ** rng.choice((2, 3, 4, 4)))
    return Question(subject=str(number), answer=number_words(number))


def _solve_to_words(subject: str) -> str:
    """By the digits as text, where `number_words` divides."""
    thousands, hundreds, rest = subject.zfill(4)[0], subject.zfill(4)[1], int(subject[-2:])
    words = f"{_SMALL[int(thousands)]} thousand " if thousands != "0" else ""
    words += f"{_SMALL[int(hundreds)]} hundred " if hundreds != "0" else ""
    if rest < 20:
        words += _SMALL[rest] if rest or not words else ""
    else:
        words += f"{_TENS[rest // 10 - 2]}-{_SMALL[rest % 10]}"
    return words.strip().removesuffix("-zero")


def _draw_from_words(rng: Random) -> Question:
    number = rng.randrange(10 ** rng.choice((2, 3, 4, 4)))
    return Question(subject=number_words(number), answer=str(number))


def _solve_from_words(subject: str) -> str:
    return str(number_of_words(subject))


def _draw_roman(rng: Random) -> Question:
    number = rng.randint(1, rng.choice((99, 999, 3999)))
    return Question(subject=str(number), answer=roman(number))


def _solve_roman(subject: str) -> str:
    """Digit by digit, where `roman` subtracts values."""
    digits = map(int, subject.zfill(4))
    return "".join(row[digit] for row, digit in zip(_ROMAN_DIGITS, digits, strict=True))


def _draw_extreme(rng: Random) -> Question:
    numbers = sorted(rng.sample(range(1000), rng.randint(3, 5)))
    which, answer = rng.choice((("largest", numbers[-1]), ("smallest", numbers[0])))
    rng.shuffle(numbers)
    return Question(subject=f"{which} of {numbers}", answer=str(answer))


def _solve_extreme(subject: str) -> str:
    which, _, listed = subject.partition(" of ")
    numbers = [int(part) for part in listed.strip("[]").split(", ")]
    return str(max(numbers) if which == "largest" else min(numbers))


NUMBER_KINDS: Final = (
    Kind(
        name="addition",
        phrasings=("What is {}?", "Add: {}", "Compute {}."),
        draw=_draw_addition,
        solve=_solve_addition,
    ),
    Kind(
        name="number-to-words",
        phrasings=("Write {} in words.", "Spell out the number {}."),
        draw=_draw_to_words,
        solve=_solve_to_words,
    ),
    Kind(
        name="words-to-number",
        phrasings=("Write in digits: {}", "Which number is {}?"),
        draw=_draw_from_words,
        solve=_solve_from_words,
    ),
    Kind(
        name="roman",
        phrasings=("As a Roman numeral: {}", "Turn {} into a Roman numeral."),
        draw=_draw_roman,
        solve=_solve_roman,
    ),
    Kind(
        name="extreme",
        phrasings=("Find the {}.", "Tell me the {}."),
        draw=_draw_extreme,
        solve=_solve_extreme,
    ),
)
