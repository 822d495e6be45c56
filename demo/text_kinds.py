"""Tasks about letters, words, dates and sentences."""

import json
import re
from datetime import date
from random import Random
from typing import Final

from demo.kind import Kind, Question
from demo.words import (
    CITIES,
    COLOURS,
    FIRST_NAMES,
    GOODS,
    LAST_NAMES,
    MONTHS,
    WEEKDAYS,
)

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz"
_SENTENCES: Final = (
    "On {day}, {name} from {city} ordered {count} {goods}.",
    "{name} bought {count} {goods} in {city} last {day}.",
    "The {count} {goods} that {name} sent from {city} arrived on {day}.",
    "In {city} it was {day} when {name} sold {count} {goods}.",
)
_SENTENCE_PATTERNS: Final = tuple(
    re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\w+)", re.escape(sentence)))
    for sentence in _SENTENCES
)


def _draw_sort(rng: Random) -> Question:
    ordered = sorted(rng.sample(_ALPHABET, rng.randint(4, 7)))
    shuffled = rng.sample(ordered, len(ordered))
    return Question(subject=" ".join(shuffled), answer=" ".join(ordered))


def _solve_sort(subject: str) -> str:
    return " ".join(sorted(subject.split()))


def _draw_reverse(rng: Random) -> Question:
    letters = [rng.choice(_ALPHABET) for _ in range(rng.randint(3, 7))]
    return Question(subject=" ".join(letters), answer=" ".join(reversed(letters)))


def _solve_reverse(subject: str) -> str:
    return subject[::-1]


def _draw_count(rng: Random) -> Question:
    wanted, *others = rng.sample(_ALPHABET, 5)
    hits = rng.randint(0, 4)
    letters = [wanted] * hits + [rng.choice(others) for _ in range(rng.randint(1, 4))]
    rng.shuffle(letters)
    return Question(subject=f"{wanted} in {' '.join(letters)}", answer=str(hits))


def _solve_count(subject: str) -> str:
    wanted, _, text = subject.partition(" in ")
    return str(text.count(wanted))


def _draw_capitals(rng: Random) -> Question:
    words = [
        rng.choice(rng.choice((FIRST_NAMES, LAST_NAMES, CITIES, GOODS)))
        for _ in range(rng.randint(2, 3))
    ]
    return Question(subject=" ".join(words), answer=" ".join(word.upper() for word in words))


def _solve_capitals(subject: str) -> str:
    return subject.upper()


def _draw_next_day(rng: Random) -> Question:
    days = [rng.randrange(7) for _ in range(rng.randint(3, 4))]
    following = (WEEKDAYS[(day + 1) % 7] for day in days)
    return Question(subject=", ".join(WEEKDAYS[day] for day in days), answer=", ".join(following))


def _solve_next_day(subject: str) -> str:
    following = dict(zip(WEEKDAYS, (*WEEKDAYS[1:], WEEKDAYS[0]), strict=True))
    return ", ".join(following[day] for day in subject.split(", "))


def _draw_day(rng: Random) -> date:
    return date.fromordinal(
        rng.randint(date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal())
    )


def _draw_to_iso(rng: Random) -> Question:
    day = _draw_day(rng)
    month = MONTHS[day.month - 1]
    subject = rng.choice((f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"))
    return Question(subject=subject, answer=day.isoformat())


def _solve_to_iso(subject: str) -> str:
    first, second, year = subject.replace(",", "").split()
    month, day = (first, second) if first in MONTHS else (second, first)
    return f"{year}-{MONTHS.index(month) + 1:02d}-{int(day):02d}"


def _draw_from_iso(rng: Random) -> Question:
    day = _draw_day(rng)
    return Question(subject=day.isoformat(), answer=f"{day.day} {MONTHS[day.month - 1]} {day.year}")


def _solve_from_iso(subject: str) -> str:
    year, month, day = subject.split("-")
    return f"{day.removeprefix('0')} {MONTHS[int(month) - 1]} {year}"


def _draw_field(rng: Random) -> Question:
    fields = {
        "name": rng.choice(FIRST_NAMES),
        "city": rng.choice(CITIES),
        "count": str(rng.randint(2, 99)),
        "goods": rng.choice(GOODS),
        "day": rng.choice(WEEKDAYS),
    }
    wanted = rng.choice(tuple(fields))
    sentence = rng.choice(_SENTENCES).format_map(fields)
    return Question(subject=f"{wanted}: {sentence}", answer=fields[wanted])


def _solve_field(subject: str) -> str:
    wanted, _, sentence = subject.partition(": ")
    found = (pattern.fullmatch(sentence) for pattern in _SENTENCE_PATTERNS)
    return next(match[wanted] for match in found if match)


def _draw_record(rng: Random) -> Question:
    name, age, colour = rng.choice(FIRST_NAMES), rng.randint(10, 99), rng.choice(COLOURS)
    return Question(
        subject=f"{name}, {age}, {colour}",
        answer=f'{{"name": "{name}", "age": {age}, "colour": "{colour}"}}',
    )


def _solve_record(subject: str) -> str:
    name, age, colour = subject.split(", ")
    return json.dumps({"name": name, "age": int(age), "colour": colour})


TEXT_KINDS: Final = (
    Kind(
        name="sort",
        phrasings=("Sort the letters: {}", "Put these letters in order: {}"),
        draw=_draw_sort,
        solve=_solve_sort,
    ),
    Kind(
        name="reverse",
        phrasings=("Reverse: {}", "Write backwards: {}"),
        draw=_draw_reverse,
        solve=_solve_reverse,
    ),
    Kind(
        name="count",
        phrasings=("Count the letter {}", "How often is {}?"),
        draw=_draw_count,
        solve=_solve_count,
    ),
    Kind(
        name="capitals",
        phrasings=("In capitals: {}", "Write in upper case: {}"),
        draw=_draw_capitals,
        solve=_solve_capitals,
    ),
    Kind(
        name="next-weekday",
        phrasings=("Name the day after each of {}.", "Tomorrow of each day: {}"),
        draw=_draw_next_day,
        solve=_solve_next_day,
    ),
    Kind(
        name="date-to-iso",
        phrasings=("Write the date {} in ISO format.", "ISO date of {}"),
        draw=_draw_to_iso,
        solve=_solve_to_iso,
    ),
    Kind(
        name="date-from-iso",
        phrasings=("Write out the date {}.", "Say the ISO date {} with the month as a word."),
        draw=_draw_from_iso,
        solve=_solve_from_iso,
    ),
    Kind(
        name="field",
        phrasings=("Extract the {}", "Read and give only the {}"),
        draw=_draw_field,
        solve=_solve_field,
    ),
    Kind(
        name="record",
        phrasings=("As JSON with name, age and colour: {}", "Make a JSON object of {}"),
        draw=_draw_record,
        solve=_solve_record,
    ),
)
