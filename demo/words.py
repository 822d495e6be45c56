"""Word lists the tasks draw from."""

from typing import Final


def listed(text: str) -> tuple[str, ...]:
    """The words of a text, for lists that are easier read as one."""
    return tuple(text.split())


FIRST_NAMES: Final = listed(
    "Anna Boris Clara David Elena Felix Greta Hassan Ingrid Jamal Karin Liam Maria Nadia Oscar "
    "Petra Quentin Rosa Samuel Tara Ulrich Vera Walter Yusuf Zoe Aiko Bruno Carmen Dmitri Esther "
    "Farid Gloria Hugo Irene Jonas Keiko Laura Miguel Nora Omar Paula Ravi Sofia Tomas"
)
LAST_NAMES: Final = listed(
    "Adler Brown Castro Dumont Evans Fischer Garcia Hansen Ibrahim Jensen Kovacs Lopez Moreau "
    "Novak Olsen Patel Quinn Rossi Santos Tanaka Urban Vogel Weber Xu Young Ziegler Almeida Berg "
    "Cohen Duarte Ekman Fontana Gupta Haas Iversen Janssen Keller Lindt Murphy Nielsen"
)
CITIES: Final = listed(
    "Lisbon Oslo Cairo Lima Delhi Tokyo Paris Madrid Vienna Prague Dublin Athens Rome Berlin "
    "Warsaw Zagreb Sofia Tunis Accra Nairobi Hanoi Seoul Manila Sydney Toronto Boston Denver "
    "Austin Quito Bogota Havana Bergen Geneva Milan Porto Seville Krakow Riga Tallinn"
)
GOODS: Final = listed(
    "lamps chairs tables books pens cups plates forks spoons knives clocks mirrors carpets "
    "blankets pillows shirts coats hats gloves boots tents ropes hammers nails screws candles "
    "baskets bottles kettles radios cameras bicycles"
)
COLOURS: Final = listed("red green blue yellow white black brown orange purple grey")
WEEKDAYS: Final = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS: Final = listed(
    "January February March April May June July August September October November December"
)
