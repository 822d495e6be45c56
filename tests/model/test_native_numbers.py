"""Numbers of 16 bits in the kernels, whatever a compiler knows of them."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import files

import pytest
import torch
from torch import Tensor

from tests.native import HERE

_FUNCTIONS = """
void widen(const char *halves, float *numbers, int64_t num) {
    for (int64_t i = 0; i < num; i += LOT) {
        Lot lot = load(halves + 2 * i, FLOAT16);
        memcpy(numbers + i, &lot, sizeof lot);
    }
}

void narrow(char *halves, const float *numbers, int64_t num) {
    for (int64_t i = 0; i < num; i += LOT) {
        Lot lot;
        memcpy(&lot, numbers + i, sizeof lot);
        store(halves + 2 * i, lot, FLOAT16);
    }
}

void narrow_words(uint32_t *words, const float *numbers, int64_t num) {
    for (int64_t i = 0; i < num; i += LANES) {
        Words some = halves_of(read_floats(numbers + i));
        memcpy(words + i, &some, sizeof some);
    }
}
"""
_MARCHES = {"x86-64": "portable", "haswell": "avx2", "skylake-avx512": "avx512"}
"""With the set that a processor needs to run it."""


@pytest.fixture(scope="module", params=_MARCHES)
def call(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Tensor, Tensor], None]:
    """Calls a function, made by a compiler that has no type for float16, as GCC before 12."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.machine() != "x86_64" or _MARCHES[request.param] not in HERE:
        pytest.skip("no gcc, or another processor")
    library = tmp_path_factory.mktemp("numbers") / "numbers.so"
    numbers = files("moebatch.model.native").joinpath("numbers.h").read_text()
    source = "\n".join(["#define OF_THE_REST", numbers, _FUNCTIONS])
    flags = ("-O1", "-std=gnu11", "-fPIC", "-shared", "-U__FLT16_MAX__", f"-march={request.param}")
    command = [compiler, *flags, "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    loaded = ctypes.CDLL(str(library))
    assert loaded.moebatch_supports(2), "float16, as of torch"

    def function(name: str, first: Tensor, second: Tensor) -> None:
        of_two = ctypes.c_void_p(first.data_ptr()), ctypes.c_void_p(second.data_ptr())
        loaded[name](*of_two, ctypes.c_int64(first.numel()))

    return function


def test_every_float16_is_read(call: Callable[[str, Tensor, Tensor], None]) -> None:
    halves = torch.arange(2**16).to(torch.int16).view(torch.float16)
    numbers = torch.full(halves.shape, 7.0)
    call("widen", halves, numbers)
    torch.testing.assert_close(numbers, halves.float(), rtol=0, atol=0, equal_nan=True)


def test_every_float32_becomes_the_nearest_float16(
    call: Callable[[str, Tensor, Tensor], None],
) -> None:
    """The middle between two goes to the even one."""
    halves = torch.arange(2**16).to(torch.int16).view(torch.float16)
    upper = (torch.arange(2**16) << 16).to(torch.int32)
    some = [(upper + low).view(torch.float32) for low in (0, 0x1000, 0x8001)]
    middles = halves.float() + halves.float().diff(append=torch.zeros(1)) / 2
    around = [middles, middles.nextafter(torch.tensor(9e9)), middles.nextafter(-torch.tensor(9e9))]
    numbers = torch.cat([*some, *around])
    wanted = numbers.half()
    found = torch.full(numbers.shape, 7.0, dtype=torch.float16)
    call("narrow", found, numbers)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), wanted.signbit())
    words = torch.full(numbers.shape, 7, dtype=torch.int32)
    call("narrow_words", words, numbers)
    found = words.to(torch.int16).view(torch.float16)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
