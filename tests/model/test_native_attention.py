"""Compiled attention: equal to torch within rounding, and never in the way where it cannot be."""

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.job.stop import StopNow
from moebatch.model.attention.cached_numbers import decode, encode
from moebatch.model.attention.plan import AttentionPlan
from moebatch.model.attention.span import Span
from moebatch.model.native import loader
from moebatch.model.native.attention_work import Cached, SingleQueries, work_of
from moebatch.model.native.compiler import cache_folder
from moebatch.model.native.kernels import Kernels
from moebatch.model.native.scoring import Scoring
from moebatch.quoting import shown
from moebatch.spec.model.cache_layout import CacheDtype
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from tests.few import examples
from tests.model.test_parts import planner
from tests.native import load_chosen

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of outputs around one; half a unit in the last place of a 16-bit number is 4e-3 and 5e-4."""
KERNELS = load_chosen()

needs_kernels = pytest.mark.skipif(
    not isinstance(KERNELS, Kernels), reason=f"no kernels: {KERNELS}"
)


@needs_kernels
@examples(60)
@given(
    contexts=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (8, 2), (8, 1), (6, 2), (5, 1), (28, 4)]),
    head_dim=st.sampled_from([8, 20, 64, 80, 96, 128, 256]),
    value_dim=st.sampled_from([None, 9, 64, 100, 128]),
    dtype=st.sampled_from(DTYPES),
    cached_in=st.sampled_from([None, *get_args(CacheDtype)]),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equal_to_torch_within_rounding(
    contexts: list[int],
    heads: tuple[int, int],
    head_dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    cached_in: CacheDtype | None,
    num_threads: int,
    seed: int,
) -> None:
    cache = Cache(contexts, heads[1], head_dim, dtype, seed, cached_in, value_dim)
    q_THC = cache.noise(len(contexts), heads[0], head_dim)
    torch.testing.assert_close(
        attended(q_THC, cache, num_threads),
        reference(q_THC, cache),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_hundreds_of_sequences(dtype: torch.dtype) -> None:
    contexts = [1 + 37 * i % 150 for i in range(300)]
    cache = Cache(contexts, 2, 64, dtype, seed=1)
    q_THC = cache.noise(len(contexts), 8, 64)
    tolerance = TOLERANCE[dtype]
    got, want = attended(q_THC, cache, 2), reference(q_THC, cache)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_cache_of_another_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    cache = Cache([100, 3], 2, 80, cache_dtype, seed=5)
    q_THC = cache.noise(2, 8, 80).to(dtype)
    tolerance = TOLERANCE[dtype]
    got, want = attended(q_THC, cache, 1), reference(q_THC, cache)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@needs_kernels
def test_the_number_of_threads_changes_no_bit() -> None:
    cache = Cache([300, 5, 41], 4, 128, torch.bfloat16, seed=2)
    q_THC = cache.noise(3, 16, 128)
    want = attended(q_THC, cache, 1)
    assert all(torch.equal(attended(q_THC, cache, n), want) for n in (2, 3, 2))


@needs_kernels
@pytest.mark.parametrize("factor", [1e-20, 30.0, 1e4])
def test_scores_of_any_size(factor: float) -> None:
    cache = Cache([200, 17], 2, 64, torch.float32, seed=3)
    q_THC = cache.noise(2, 8, 64) * factor
    got, want = attended(q_THC, cache, 1), reference(q_THC, cache)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 if factor > 100 else 1e-5)


@needs_kernels
@pytest.mark.parametrize("factor", [1e-38, 1e-35, 1e-30])
@pytest.mark.parametrize("cached_in", [None, *get_args(CacheDtype)])
def test_queries_of_nearly_nothing_see_all_positions_alike(
    factor: float, cached_in: CacheDtype | None
) -> None:
    cache = Cache([200, 17, 1], 2, 64, torch.bfloat16, 9, cached_in)
    q_THC = cache.noise(3, 8, 64) * factor
    assert (q_THC != 0).any()
    tolerance = TOLERANCE[torch.bfloat16]
    got, want = attended(q_THC, cache, 1), reference(q_THC, cache)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
@pytest.mark.parametrize("cached_in", [None, *get_args(CacheDtype)])
@pytest.mark.parametrize("where", ["keys", "values", "queries"])
def test_broken_numbers_stay_broken_and_with_their_sequence(
    dtype: torch.dtype, what: float, cached_in: CacheDtype | None, where: str
) -> None:
    cache = Cache([40, 40, 40], 2, 64, dtype, 4, cached_in)
    q_THC = cache.noise(3, 4, 64)
    if where == "queries":
        cache.keys_RGC[cache.rows[1][20], 0, 5] = 1.0
        q_THC[1, :2, 5] = what
    else:
        lies_RGC = cache.keys_RGC if where == "keys" else cache.values_RGV
        lies_RGC[cache.rows[1][20], 0, 5] = what
        q_THC[1, :, 5] = 1.0
    got = attended(q_THC, cache, 1)
    if where == "values" and cached_in is None:
        got, others = got[..., 5], got[..., :5]
        assert others.isfinite().all()
    assert not got[1, :2].isfinite().any(), "the heads that see it"
    assert got[[0, 2]].isfinite().all() and got[1, 2:].isfinite().all()


@needs_kernels
def test_nothing_is_rounded_to_bfloat16_but_results() -> None:
    """What is known of an answer after a stop is computed as a prompt: an answer that is to go on
    as it would have has to be computed nearly as precisely before."""
    cache = Cache([300] * 8, 2, 128, torch.bfloat16, seed=8)
    q_THC = cache.noise(8, 8, 128)
    exact = attended(q_THC.float(), cache, 1).bfloat16()
    is_other = attended(q_THC, cache, 1) != exact
    assert is_other.float().mean() < 1e-3


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached_in", [None, *get_args(CacheDtype)])
def test_no_sum_of_the_largest_products_overflows(
    dtype: torch.dtype, cached_in: CacheDtype | None
) -> None:
    cache = Cache([20], 1, 1024, dtype, 7, cached_in)
    cache.keys_RGC[:] = 0.1
    cache.keys_RGC[cache.rows[0][:10]] = -0.1
    q_THC = torch.full((1, 4, 1024), 3.0, dtype=dtype)
    tolerance = TOLERANCE[dtype]
    got, want = attended(q_THC, cache, 1), reference(q_THC, cache)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached_in", [None, *get_args(CacheDtype)])
def test_thousands_of_faint_positions_count_beside_a_dominant_one(
    dtype: torch.dtype, cached_in: CacheDtype | None
) -> None:
    cache = Cache([6000], 1, 64, dtype, 6, cached_in)
    cache.keys_RGC[:] = 0.0
    cache.keys_RGC[cache.rows[0][0], 0, 0] = 88.0
    cache.values_RGV[:] = 1.0
    cache.values_RGV[cache.rows[0][0]] = 0.0
    q_THC = torch.zeros(1, 4, 64, dtype=dtype)
    q_THC[..., 0] = 1.0  # weights of exp(-11), which are 0.09 together
    torch.testing.assert_close(
        attended(q_THC, cache, 1).float(), reference(q_THC, cache).float(), rtol=0.02, atol=0.0
    )


def test_the_plan_leaves_single_tokens_and_short_slices_to_the_kernel() -> None:
    plan = plan_of([(1, 9), (3, 20), (40, 0), (1, 0)], window=8)
    if not isinstance(KERNELS, Kernels):
        assert plan.singles is None
        return
    assert plan.singles is not None and not plan.decodes
    longer = plan.slices.counts_B.tolist() if plan.slices is not None else []
    assert longer + [prompt.num_tokens for prompt in plan.prompts] == [40]
    tokens, starts, rows = (tensor.tolist() for tensor in plan.singles)
    assert tokens == [3, 2, 1, 0, 44], "longest first"
    seen = [rows[a:b] for a, b in pairwise(starts)]
    assert seen[0] == list(range(115, 123)), "the window"
    assert seen[3:] == [list(range(2, 10)), [300]]


def test_switched_off_everything_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.SWITCH, "0")
    assert loader.kernels() is None and loader.prepare() == "MOEBATCH_NATIVE=0"
    plan = plan_of([(1, 9), (3, 20), (1, 0)], window=None)
    assert plan.singles is None and plan.slices is None
    assert sum(len(group.seen.tokens_B) for group in plan.decodes) == 2
    assert [prompt.num_tokens for prompt in plan.prompts] == [3]


def test_there_is_a_reason_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loader.SWITCH, raising=False)
    assert (loader.prepare() is None) == (loader.kernels() is not None)


@pytest.mark.few
@pytest.mark.parametrize(
    "march",
    [
        "sapphirerapids",
        "cooperlake",
        "skylake-avx512",
        "haswell",
        "ivybridge",
        "sandybridge",
        "nehalem",
        "x86-64",
    ],
)
def test_a_compiler_takes_the_source_for_every_instruction_set(march: str) -> None:
    """Also for those that this processor lacks, which no other test can run, and for what lies
    between two; without kernels torch would do all work, and tests of kernels would be skipped."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no gcc for x86-64")
    # A function that is not declared would be missed only when the library is loaded.
    flags = ("-std=gnu11", f"-march={march}", "-Werror=implicit", "-fsyntax-only")
    command = [compiler, *flags, "-x", "c", "-"]
    done = subprocess.run(command, input=loader.source(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive  # compiles
@pytest.mark.parametrize("march", ["haswell", "sapphirerapids"])
def test_what_instructions_want_as_constants_is_constant_for_every_compiler(march: str) -> None:
    """Variables that never change are none for Clang; nor for GCC where it does not optimise."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no gcc for x86-64")
    flags = ("-O0", "-std=gnu11", f"-march={march}", "-S", "-o", os.devnull)
    command = [compiler, *flags, "-x", "c", "-"]
    done = subprocess.run(command, input=loader.source(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the compiler and its folder ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/bin/false", "/bin/false failed: exit code 1"),
        ("/no/such/cc -m64", "CC is '/no/such/cc -m64': there is no such command; install it"),
    ],
)
def test_without_a_working_compiler_the_reason_is_said(
    compiler: str, reason: str, tmp_path: Path
) -> None:
    found = loader.load(environment(tmp_path, CC=compiler))
    assert found == reason
    assert not list(tmp_path.rglob("*.so"))


def test_a_machine_without_a_compiler_is_to_get_one(tmp_path: Path) -> None:
    found = loader.load({**environment(tmp_path, CC=""), "PATH": str(tmp_path)})
    assert isinstance(found, str) and found.endswith("is in the path; install one")


def test_a_compiler_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "cc"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o700)
    monkeypatch.setattr("moebatch.model.native.compiler._LONGEST_S", 0.01)
    found = loader.load(environment(tmp_path, CC=str(slow)))
    assert found == f"{slow} did not end within 0.01 seconds; is the machine busy?"


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no disk >&2\nexit 1\n")
    compiler.chmod(0o700)
    found = loader.load(environment(tmp_path, CC=str(compiler)))
    assert found == f"{compiler} failed: no disk"
    assert not list((tmp_path / "moebatch").iterdir())


@pytest.mark.parametrize("said", ['gcc "', "gcc \\"])
def test_a_compiler_that_is_no_command_is_a_reason(said: str, tmp_path: Path) -> None:
    settings = environment(tmp_path, CC=said)
    loader.log_compiling(lambda line: pytest.fail(line), settings)
    found = loader.load(settings)
    assert isinstance(found, str)
    assert found.startswith(f"CC is {shown(said)}, which is no command: No ")


def test_a_compiler_may_be_named_and_complain_in_any_encoding(tmp_path: Path) -> None:
    compiler = tmp_path / os.fsdecode(b"c\xe9c")
    compiler.write_bytes(b"#!/bin/sh\necho 'no r\xe9pertoire' >&2\nexit 1\n")
    compiler.chmod(0o700)
    found = loader.load(environment(tmp_path, CC=str(compiler)))
    assert found == f"{compiler} failed: no r\\xe9pertoire"


def test_of_what_a_compiler_says_the_error_is_the_reason(tmp_path: Path) -> None:
    """As an assembler has it that is too old for the compiler."""
    compiler = tmp_path / "cc"
    said = "{standard input}: Assembler messages:\\n{standard input}:7: Error: no such instruction"
    compiler.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    compiler.chmod(0o700)
    found = loader.load(environment(tmp_path, CC=str(compiler)))
    assert found == f"{compiler} failed: {{standard input}}:7: Error: no such instruction"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, made by the real compiler; where it is kept, if it is."""
    settings: Mapping[str, str] = os.environ
    if cache_folder(settings) is None:
        settings = environment(tmp_path_factory.mktemp("compiled"))
    found, folder = loader.load(settings), cache_folder(settings)
    if isinstance(found, str):
        pytest.skip(found)
    assert folder is not None
    return folder / loader._library(settings).name


@pytest.fixture
def copier(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiler that takes no time; it counts its uses in a file beside it."""
    script = tmp_path_factory.mktemp("copier") / "cc"
    script.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\ncat >/dev/null\n"
        'case "$*" in *-shared*) echo used >>"$0.log";; esac\n'
        f'cp {shlex.quote(str(compiled))} "$last"\n'
    )
    script.chmod(0o700)
    return script


def num_uses(copier: Path) -> int:
    log = copier.with_suffix(".log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_library_is_made_once_and_no_other_user_may_touch_it(
    copier: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert isinstance(loader.load(environment(tmp_path, CC=str(copier))), Kernels)
        (made,) = (tmp_path / "moebatch").iterdir()
    assert num_uses(copier) == 1
    assert made.stat().st_mode & 0o777 == 0o500


def test_what_has_been_made_needs_no_compiler(copier: Path, tmp_path: Path) -> None:
    """As from cron, where the path is short."""
    directory = str(copier.parent)
    assert isinstance(loader.load(environment(tmp_path, PATH=f"{directory}:/bin")), Kernels)
    settings = environment(tmp_path, PATH="")
    assert not loader.needs_compiling(settings)
    assert isinstance(loader.load(settings), Kernels)


@pytest.mark.parametrize("damage", ["cut short", "cut in the middle", "writable by others"])
def test_a_library_that_cannot_be_trusted_is_made_anew(
    damage: str, copier: Path, compiled: Path, tmp_path: Path
) -> None:
    settings = environment(tmp_path, CC=str(copier))
    folder = cache_folder(settings)
    assert folder is not None
    assert loader.needs_compiling(settings)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert isinstance(loader.load(environment(elsewhere, CC=str(copier))), Kernels)
    (named,) = (elsewhere / "moebatch").iterdir()
    made = folder / named.name
    whole = compiled.read_bytes()
    made.write_bytes(
        {"cut short": b"\x7fELF", "cut in the middle": whole[: len(whole) // 2]}.get(damage, whole)
    )
    made.chmod(0o777 if damage == "writable by others" else 0o700)
    assert isinstance(loader.load(settings), Kernels)
    assert num_uses(copier) == 2 and made.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize("how", ["no folder", "a file in its place", "others may write there"])
def test_without_a_safe_folder_it_is_compiled_for_this_process_alone(
    how: str, copier: Path, tmp_path: Path
) -> None:
    folder, base = tmp_path / "moebatch", tmp_path
    if how == "no folder":
        base = Path("/proc/nowhere")
    elif how == "a file in its place":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert isinstance(loader.load(environment(base, CC=str(copier))), Kernels)
    assert not list(tmp_path.rglob("*.so"))


def test_a_folder_that_cannot_be_written_is_read(
    copier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image of a container. What it lacks is compiled for this process alone."""
    settings = environment(tmp_path, CC=str(copier))

    def read_only(path: str | Path, mode: int) -> bool:
        return not mode & os.W_OK

    with monkeypatch.context() as patched:
        patched.setattr(os, "access", read_only)
        assert isinstance(loader.load(settings), Kernels)
        assert loader.needs_compiling(settings) and not list(tmp_path.rglob("*.so"))
    assert isinstance(loader.load(settings), Kernels)
    monkeypatch.setattr(os, "access", read_only)
    assert isinstance(loader.load(settings), Kernels)
    assert num_uses(copier) == 2


def test_nothing_is_kept_where_nothing_may_be_loaded_from(
    copier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where homes are mounted noexec: it would be compiled each time, and never loaded."""
    here = os.statvfs(tmp_path)
    noexec = os.statvfs_result((*here[:8], here.f_flag | os.ST_NOEXEC, here.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    settings = environment(tmp_path, CC=str(copier))
    assert isinstance(loader.load(settings), Kernels)
    assert loader.needs_compiling(settings) and not list(tmp_path.rglob("*.so"))


def test_a_folder_for_caches_that_is_relative_is_ignored(tmp_path: Path) -> None:
    settings = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "~/.cache"}
    assert cache_folder(settings) == tmp_path / ".cache/moebatch"
    assert cache_folder({**settings, "HOME": "."}) is None


@pytest.mark.parametrize("heard_by", ["the thread that waits", "another"])
def test_what_breaks_a_compilation_off_ends_the_compilers_and_all_that_work_for_them(
    heard_by: str, tmp_path: Path
) -> None:
    """Each keeps a pipe open, which has an end when nothing of them is left. A signal wakes only
    the thread that hears it, and one that comes just before a wait wakes none."""
    compiler, pipe = tmp_path / "cc", tmp_path / "pipe"
    worker = "sleep 60; echo it was waited for >&3"
    compiler.write_text(f"#!/bin/sh\nexec 3>{pipe}\nkill -USR1 $PPID\nsh -c '{worker}'\nexit 1\n")
    compiler.chmod(0o700)
    os.mkfifo(pipe)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise StopNow

    before = signal.signal(signal.SIGUSR1, stop)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    blocked = {signal.SIGUSR1} if heard_by == "another" else set[signal.Signals]()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with pytest.raises(StopNow):
            loader.load(environment(tmp_path, CC=str(compiler)))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        signal.signal(signal.SIGUSR1, before)
        is_over.set()
        other.join()
    os.set_blocking(reader, True)
    with os.fdopen(reader) as left:
        assert left.read() == ""
    assert not list((tmp_path / "moebatch").iterdir())


@pytest.mark.exhaustive
def test_two_processes_may_compile_at_once(copier: Path, tmp_path: Path) -> None:
    program = (
        "import os; from moebatch.model.native import loader; "
        "print(type(loader.load(os.environ)).__name__)"
    )
    # Each waits for the other while it compiles.
    script = copier.read_text().replace(
        '"$0.log"', '"$0.log"; until [ "$(wc -l <"$0.log")" = 2 ]; do :; done'
    )
    copier.write_text(script)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **environment(tmp_path, CC=str(copier))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["Kernels"] * 2
    assert num_uses(copier) == 2
    assert len(list((tmp_path / "moebatch").iterdir())) == 1


# --- helpers --------------------------------------------------------------------------------------


class Cache:
    """Keys and values of some sequences, in pages in random order; rows of no sequence are NaN."""

    def __init__(
        self,
        contexts: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        seed: int,
        cached_in: CacheDtype | None = None,
        value_dim: int | None = None,
    ) -> None:
        self.cached_in = cached_in
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        counts = [pages_of(context) for context in contexts]
        pages = torch.randperm(sum(counts), generator=self._generator)
        rows = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).split(counts)
        self.rows = [part.flatten()[:context] for part, context in zip(rows, contexts, strict=True)]
        size = (len(pages) * PAGE_TOKENS, num_kv_heads)
        self.keys_RGC = self.noise(*size, head_dim)
        self.values_RGV = self.noise(*size, value_dim or head_dim)
        unused = torch.ones(size[0], dtype=torch.bool)
        unused[torch.cat(self.rows)] = False
        self.keys_RGC[unused] = self.values_RGV[unused] = torch.nan

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values as kernels read them."""
        numbers = self.keys_RGC, self.values_RGV
        if self.cached_in is None:
            return numbers
        keys, values = (encode(x, self.cached_in) for x in numbers)
        return keys, values

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """What these are."""
        if self.cached_in is None:
            return self.stored
        sizes = self.keys_RGC.shape, self.values_RGV.shape
        keys, values = (
            decode(x, self.cached_in, torch.empty(size))
            for x, size in zip(self.stored, sizes, strict=True)
        )
        return keys, values

    def noise(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self._dtype)


def attended(q_THC: Tensor, cache: Cache, num_threads: int) -> Tensor:
    """By the kernel, tokens in reverse order."""
    assert isinstance(KERNELS, Kernels)
    lengths = torch.tensor([0, *map(len, cache.rows[::-1])])
    queries = SingleQueries(
        tokens_B=torch.arange(len(cache.rows) - 1, -1, -1),
        starts_B=lengths.cumsum(0),
        rows_N=torch.cat(cache.rows[::-1]),
    )
    out_THV = room_for(q_THC, cache)
    cached = Cached(*cache.stored, cache.cached_in)  # only pointers go to the kernel
    scoring = Scoring(q_THC.shape[2] ** -0.5)
    work = work_of(queries, q_THC, cached, out_THV, scoring, num_threads=num_threads)
    KERNELS.attend[cached.number](work, num_threads)
    return out_THV


def reference(q_THC: Tensor, cache: Cache) -> Tensor:
    """By torch, in float64, rounded at the end."""
    out_THV, numbers = room_for(q_THC, cache), cache.numbers
    for token, rows in enumerate(cache.rows):
        k_GSC, v_GSC = (kv[rows].double().transpose(0, 1) for kv in numbers)
        q_H1C = q_THC[token].double()[:, None]
        out = F.scaled_dot_product_attention(q_H1C[None], k_GSC[None], v_GSC[None], enable_gqa=True)
        out_THV[token] = out[0, :, 0].to(q_THC.dtype)
    return out_THV


def room_for(q_THC: Tensor, cache: Cache) -> Tensor:
    """NaN, as many as attention puts out."""
    return q_THC.new_full((*q_THC.shape[:2], cache.values_RGV.shape[2]), torch.nan)


def plan_of(slices: Sequence[tuple[int, int]], window: int | None) -> AttentionPlan:
    """Of spans of (new tokens, context), whose rows begin at 0, 100, 200, …"""
    spans, start = [], 0
    for i, (num_tokens, context) in enumerate(slices):
        rows_S = 100 * i + np.arange(context + num_tokens)
        spans.append(
            Span(start=start, num_tokens=num_tokens, context=context, rows_S=rows_S, rope_length=1)
        )
        start += num_tokens
    return planner(window).plan(spans).by_window[window].plans[0]


def environment(folder: Path, **others: str) -> Mapping[str, str]:
    """With that folder for caches, and the usual compiler if nothing else is said."""
    found = {name: os.environ[name] for name in ("CC", "PATH") if name in os.environ}
    return {**found, "XDG_CACHE_HOME": str(folder), **others}
