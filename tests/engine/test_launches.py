"""A device that counts: operators and copies of every task, beside what the planner counts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.passes.pipeline import Pipeline
from moebatch.formats import decoding
from moebatch.layout.ladder import Ladder
from moebatch.layout.load import PassLoad
from moebatch.model.attention import by_torch as attention
from moebatch.model.gpu import experts as gpu_experts
from moebatch.model.gpu import gates as gpu_gates
from moebatch.model.gpu import rows as gpu_rows
from moebatch.model.native import loader
from moebatch.model.routing import tokens
from moebatch.plan.pricing import launches as of_copies
from moebatch.plan.pricing.launches import Launches
from moebatch.schedule.task import Kind, Task
from moebatch.spec.model.cache_layout import StateCache
from moebatch.store.experts.packed import PackedLayout
from tests.engine.test_engine import requests
from tests.engine.test_schedules import EMULATED, run
from tests.gpu_kernels import use_gpu_kernels, use_launch
from tests.quantised import write_quantised
from tests.tiny import CACHED_APART

_VIEWS = (
    "view _unsafe_view t transpose permute slice select split expand unsqueeze squeeze as_strided "
    "alias detach unbind flatten chunk reshape mT numpy_T"
)
_ROOM = "empty empty_like new_empty to resolve_conj resolve_neg is_nonzero"
_FREE = frozenset(f"{_VIEWS} split_with_sizes {_ROOM}".split(" "))
"""Operators that launch nothing, or nothing where types agree."""
_SEQUENCES = 8
_AFTER = (Kind.GATE, Kind.EXPERT, Kind.COMBINE)


class CountingDevice(TorchDispatchMode):
    """Counts what a GPU would be asked to launch, by tasks. On a CPU that has no kernels of ours,
    torch's operators are those that a GPU gets, and launches in Triton where it has such."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.tasks: dict[Kind, list[tuple[Task, Counter[str]]]] = defaultdict(list)
        self._now: Counter[str] = Counter()
        self._thread = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        self.count(name)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, number: int = 1) -> None:
        """What the thread of a task does, and no other meanwhile."""
        if name.rstrip("_") not in _FREE and get_ident() == self._thread:
            self._now[name] += number

    def do(self, task: Task, work: Callable[[], None]) -> None:
        """One task at a time."""
        self._now, self._thread = Counter(), get_ident()
        with self:
            work()
        self.tasks[task.kind].append((task, self._now))

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a prompt, and new ones. Triton's interpreter takes a millisecond for each row
        of each kernel."""
        return (3, 4) if self.is_fused else (40, 24)

    @property
    def load(self) -> PassLoad:
        """Of one micro-batch that decodes."""
        num_prompt, num_new = self.lengths
        num_sequences = _SEQUENCES / 2
        return PassLoad(
            decode_sequences=num_sequences,
            decode_positions=num_sequences * (num_prompt + num_new / 2),
        )

    def number(self, kind: Kind) -> int:
        """Of tasks."""
        return len(self.tasks[kind])

    def total(self, kind: Kind) -> int:
        """Launches of all tasks of a kind."""
        return sum(counted.total() for _, counted in self.tasks[kind])

    def mean(self, kind: Kind) -> float:
        """The same of one."""
        return self.total(kind) / self.number(kind)


@pytest.fixture
def counting(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[CountingDevice]:
    """Asked for with whether it has kernels in Triton."""
    device = CountingDevice(is_fused=request.param)
    do, sdpa = Pipeline.do, F.scaled_dot_product_attention

    def counted(self: Pipeline, task: Task) -> None:
        with self._executor.lock:
            device.do(task, lambda: do(self, task))

    def attend(*arguments: Any, **options: Any) -> torch.Tensor:
        device.count("scaled_dot_product_attention")
        with _disable_current_modes():
            return sdpa(*arguments, **options)

    def put(table: list[tuple[int, ...]], on: torch.device) -> torch.Tensor:
        device.count("copy")
        with _disable_current_modes():
            return torch.tensor(table)

    read_back = tokens.read_back

    def copied(counts_E: torch.Tensor) -> dict[int, int]:
        device.count("copy")
        return read_back(counts_E)

    for module in (tokens, gpu_gates):
        monkeypatch.setattr(module, "read_back", copied)
    if device.is_fused:
        use_gpu_kernels(monkeypatch)
        launch_really = gpu_rows.launch

        def launch(*arguments: Any, **options: Any) -> None:
            device.count("launch")
            with _disable_current_modes():
                launch_really(*arguments, **options)

        use_launch(monkeypatch, launch)
        monkeypatch.setattr(Ladder, "most_together", lambda ladder, policy: 3)
        monkeypatch.setattr(gpu_experts, "_on_device", put)
    monkeypatch.setattr(loader, "kernels", lambda: None)
    monkeypatch.setattr(Pipeline, "do", counted)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", attend)
    yield device


def decoded(
    counting: CountingDevice,
    folder: Path,
    tmp_path: Path,
    title: str,
    schedule: str,
    states: StateCache = "full",
) -> Launches:
    """Runs sequences of one length, and keeps the passes in which all of them decode; what is said
    of their launches."""
    num_prompt, num_new = counting.lengths
    policy = replace(
        EMULATED[title],
        schedule=schedule,
        batch_size=_SEQUENCES,
        micro_batch_size=_SEQUENCES // 2,
        tokens_per_pass=_SEQUENCES * num_prompt,
        num_kv_pages=64,
    )
    rows = requests((num_prompt,) * _SEQUENCES, max_tokens=num_new)
    run(folder, policy, rows, scratch=tmp_path, states=states)
    files = open_model(folder, "float32")
    for kind, tasks in counting.tasks.items():
        counting.tasks[kind] = [each for each in tasks if each[0].step >= files.shape.num_layers]
    shape = files.shape.cached_in(states=states).attending_within(num_prompt + num_new)
    return Launches.of(shape, files.dtypes, is_fused=counting.is_fused)


@pytest.mark.few(family=CACHED_APART)
@pytest.mark.parametrize(
    ("family", "counting"),
    [
        ("mixtral", False),
        ("qwen3_moe", False),
        ("qwen2_moe", False),
        ("granitemoeshared", False),
        ("flex_olmo", False),
        ("gemma4_text", False),
        ("gpt_oss", False),
        ("mimo_v2_flash", False),
        ("granitemoe_swa", False),
        ("kolibri1", False),
        ("flint", False),
        ("step3p7", False),
        ("laguna", False),
        ("deepseek_v4", False),
        ("hy_v4", False),
        ("axk2", False),
        ("mistral_large4", False),
        ("glm5_next", False),
        ("minimax_m3_vl", False),
        ("dots3_note", False),
        ("beam", False),
        ("muse_spark", False),
        ("cohere2_moe", False),
        ("phimoe", False),
        ("deepseek_v3", False),
        ("deepseek_v32", False),
        ("axk1", False),
        ("qwen3_next", False),
        ("lfm2_moe", False),
        ("granitemoehybrid", False),
        ("nemotron_h", False),
        ("jamba", False),
        ("kimi_linear", False),
        ("bailing_hybrid", False),
        ("lara_mini", False),
        ("aria_text", False),
        ("minimax", False),
        ("qwen2_moe", True),
        pytest.param("deepseek_v3", True, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", True, marks=pytest.mark.exhaustive),
        pytest.param("granitemoehybrid", True, marks=pytest.mark.exhaustive),
        pytest.param("nemotron_h", True, marks=pytest.mark.exhaustive),
        pytest.param("jamba", True, marks=pytest.mark.exhaustive),
        pytest.param("kimi_linear", True, marks=pytest.mark.exhaustive),
        pytest.param("bailing_hybrid", True, marks=pytest.mark.exhaustive),
        pytest.param("minimax", True, marks=pytest.mark.exhaustive),
        pytest.param("muse_spark", True, marks=pytest.mark.exhaustive),
    ],
    indirect=["counting"],
)
def test_tasks_launch_as_much_as_they_are_priced_for(
    tiny_checkpoint: Callable[..., Path], counting: CountingDevice, tmp_path: Path, family: str
) -> None:
    title = "GPU attention, cache in main memory"
    launches = decoded(counting, tiny_checkpoint(family), tmp_path, title, "klotski")
    kinds = (Kind.ATTEND, Kind.KV_UP, Kind.KV_DOWN)
    assert {kind: counting.mean(kind) for kind in kinds} == pytest.approx(
        {kind: launches.of_batch(kind, counting.load) for kind in kinds}, rel=0.05
    )
    assert_planned(counting, launches)


@pytest.mark.parametrize(
    "counting", [False, pytest.param(True, marks=pytest.mark.exhaustive)], indirect=True
)
def test_latents_are_launched_as_they_are_priced(
    tiny_checkpoint: Callable[..., Path], counting: CountingDevice, tmp_path: Path
) -> None:
    """By what they add to gates, and to the sums of outputs."""
    title, found, priced = "GPU attention, cache in main memory", [], []
    for width in (None, 18):
        counting.tasks.clear()
        folder = tiny_checkpoint("nemotron_h", moe_latent_size=width)
        launches = decoded(counting, folder, tmp_path, title, "klotski")
        found.append([counting.mean(kind) for kind in (Kind.GATE, Kind.COMBINE)])
        priced.append([launches.of_gates[-1], launches.of_combine(is_joined=True)])
    added = [with_latents - without for without, with_latents in zip(*found, strict=True)]
    assert added == [with_latents - without for without, with_latents in zip(*priced, strict=True)]


@pytest.mark.parametrize(
    "counting", [False, pytest.param(True, marks=pytest.mark.exhaustive)], indirect=True
)
def test_what_is_given_back_and_added_late_is_launched_as_it_is_priced(
    tiny_checkpoint: Callable[..., Path], counting: CountingDevice, tmp_path: Path
) -> None:
    """And latents that are scaled. Layers without experts are for all micro-batches, and looked at
    in the end."""
    title, differences = "GPU attention, cache in main memory", []
    for num_identities in (0, 4):
        counting.tasks.clear()
        folder = tiny_checkpoint("longcat_flash", zero_expert_num=num_identities)
        launches = decoded(counting, folder, tmp_path, title, "klotski")
        gate, dense = launches.of_gates[:2]
        assert counting.mean(Kind.ATTEND) == launches.of_batch(Kind.ATTEND, counting.load)
        assert counting.mean(Kind.DENSE) == 2 * dense + of_copies._LOOKING
        assert counting.mean(Kind.GATE) == gate - 1  # is not widened from float32
        sums = counting.mean(Kind.COMBINE) - launches.of_combine(is_joined=True)
        differences.append(sums)
    sorting = launches._sorting(is_joined=True)  # when experts run
    assert differences == [-sorting, -sorting]


@pytest.mark.parametrize("counting", [False], indirect=True)
@pytest.mark.parametrize("family", ["hy_v4", "deepseek_v3"])
def test_layers_without_experts_are_launched_as_they_are_priced(
    tiny_checkpoint: Callable[..., Path], counting: CountingDevice, tmp_path: Path, family: str
) -> None:
    """For both micro-batches, and looked at in the end."""
    title, folder = "GPU attention, cache in main memory", tiny_checkpoint(family)
    launches = decoded(counting, folder, tmp_path, title, "klotski")
    assert counting.mean(Kind.DENSE) == 2 * launches.of_gates[0] + of_copies._LOOKING


@pytest.mark.parametrize("counting", [False], indirect=True)
@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_states_in_float16_are_copied_and_rounded(
    tiny_checkpoint: Callable[..., Path], counting: CountingDevice, tmp_path: Path, family: str
) -> None:
    title, folder = "GPU attention, cache in main memory", tiny_checkpoint(family)
    launches = decoded(counting, folder, tmp_path, title, "klotski", "float16")
    priced = launches.of_batch(Kind.ATTEND, counting.load)
    assert counting.mean(Kind.ATTEND) == pytest.approx(priced, rel=0.05)


@pytest.mark.exhaustive  # Triton's interpreter takes five seconds for each
@pytest.mark.parametrize("counting", [True], indirect=True)
@pytest.mark.parametrize(
    ("kind", "family", "sizes"),
    [
        ("mxfp4", "gpt_oss", {}),
        ("fp8", "qwen2_moe", {"moe_intermediate_size": 32}),
        ("bnb-nf4", "mixtral", {"hidden_size": 64, "intermediate_size": 64}),
    ],
)
def test_experts_in_codes_are_launched_together_as_planned(
    tiny_checkpoint: Callable[..., Path],
    counting: CountingDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    family: str,
    sizes: Mapping[str, int],
) -> None:
    read = decoding._codebook_state

    def read_back(text: torch.Tensor) -> Mapping[str, Any]:
        counting.count("copy")
        return read(text)

    monkeypatch.setattr(decoding, "_codebook_state", read_back)
    folder = write_quantised(tiny_checkpoint(family, **sizes), kind, tmp_path / kind)
    title = "GPU attention, cache in main memory"
    launches = decoded(counting, folder, tmp_path, title, "klotski")
    assert launches.groups(1)
    assert_planned(counting, launches)


def assert_planned(counting: CountingDevice, launches: Launches) -> None:
    """What follows attention; of gates before experts that are computed together, and of those, to
    the last launch."""
    num_gates, _, num_sums = map(counting.number, _AFTER)
    gates = num_gates * launches.of_gates[-1]
    experts = sum(
        launches.of_experts([1] * len(task.experts)) for task, _ in counting.tasks[Kind.EXPERT]
    )
    planned = gates + experts + num_sums * launches.of_combine(is_joined=True)
    assert sum(map(counting.total, _AFTER)) == pytest.approx(planned, rel=0.1)
    if launches.groups(1):
        widened = num_gates * launches.shape.router.has_exact_logits  # but not from float32
        assert counting.total(Kind.GATE) == gates - widened
        counts = [counted for _, counted in counting.tasks[Kind.EXPERT]]
        # The first task of a layer joins its micro-batches, too.
        assert sum(each["launch"] + each["copy"] for each in counts) == experts + num_sums


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "counting"),
    [
        ("mixtral", False),
        ("qwen3_moe", False),
        ("granitemoeshared", False),
        ("deepseek_v2", False),
        ("afmoe", False),
        ("step3p7", False),
        ("hy_v4", False),
        ("axk2", False),
        ("mistral_large4", False),
        ("dots3_note", False),
        ("beam", False),
        ("muse_spark", False),
        ("laguna", False),
        pytest.param("granitemoeshared", True, marks=pytest.mark.exhaustive),  # takes 5 s
    ],
    indirect=["counting"],
)
def test_tasks_around_attention_on_the_cpu_launch_as_much_as_they_are_priced_for(
    tiny_checkpoint: Callable[..., Path], counting: CountingDevice, tmp_path: Path, family: str
) -> None:
    chooses = family in ("hy_v4", "axk2", "mistral_large4", "dots3_note")
    options = {"index_topk": 5000} if chooses else {}  # of more would be chosen
    folder = tiny_checkpoint(family, **options)
    launches = decoded(counting, folder, tmp_path, "CPU attention", "cgopipe")
    kinds = (Kind.PRE, Kind.OFF, Kind.LOAD)
    assert {kind: counting.mean(kind) for kind in kinds} == pytest.approx(
        {kind: launches.of_batch(kind, counting.load) for kind in kinds}, rel=0.02
    )
    shape, num_posts = launches.shape, counting.number(Kind.POST)
    of_layer, num_moe = num_posts / shape.num_layers, len(shape.moe_layers)
    experts = num_posts * launches.of_experts([1, 1])
    if not counting.is_fused:
        num_gates = sum(counted["silu_"] for _, counted in counting.tasks[Kind.POST])
        num_mlps = shape.num_layers - num_moe + num_moe * bool(shape.shared_expert)
        num_mlps += (shape.num_layers + num_moe) * bool(shape.norm_gates)  # which have SiLU too
        experts = (num_gates - of_layer * num_mlps) * launches.of_experts([1])
    beside = sum(launches.of_gates) + num_moe * launches.of_combine(is_joined=False)
    out = num_posts * launches.of_batch(Kind.OUT, counting.load)
    planned = of_layer * beside + out + experts
    assert counting.total(Kind.POST) == pytest.approx(planned, rel=0.05)


def test_an_expert_in_stacks_is_copied_tensor_by_tensor(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As gpt-oss is released: codes, scales and biases of all experts, each in a tensor."""
    files = open_model(write_quantised(tiny_checkpoint("gpt_oss"), "mxfp4", tmp_path / "q"), "auto")
    layout = PackedLayout.of(files.expert_records().values())
    assert files.dtypes.num_runs == len(layout.runs) == 6
    assert len(layout.chunks[0].parts) == of_copies.of_transfer(layout.num_bytes, 6)


@pytest.mark.parametrize("num_runs", [1, 3])
@pytest.mark.parametrize("width", [8, 1000, 3000])
def test_an_expert_is_copied_in_as_many_pieces_as_it_is_priced_for(
    width: int, num_runs: int
) -> None:
    """Three matrices on their way into a slot, in chunks, which may end where one of them does."""
    num_bytes, gap = 2 * 2048 * width, 4096 * (num_runs > 1)
    places = [
        SimpleNamespace(
            shape=shape,
            dtype=torch.bfloat16,
            num_bytes=num_bytes,
            buffer_offset=512 + n * (num_bytes + gap),
        )
        for n, shape in enumerate([(width, 2048), (width, 2048), (2048, width)])
    ]
    layout = PackedLayout.of([SimpleNamespace(places=places)])
    assert len(layout.runs) == num_runs
    assert len(layout.chunks) == of_copies.num_chunks(3 * num_bytes)
    num_copies = sum(len(chunk.parts) for chunk in layout.chunks)
    planned = of_copies.of_transfer(3 * num_bytes, num_runs)
    assert planned - (num_runs - 1) <= num_copies <= planned
