"""Calibration end to end on tiny checkpoints, held against transformers' routing."""

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moebatch.calibration import calibrate, lessons, reading_policy
from moebatch.calibration.calibrate import Calibration, CalibrationSummary, reading_folder
from moebatch.calibration.lessons import Teacher
from moebatch.calibration.order import CalibrationOrder
from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.checkpoint.model_files import open_model
from moebatch.cli.process import carried_out
from moebatch.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFit,
    InputError,
    Interrupted,
    LockHeld,
    MoebatchError,
    StorageError,
    Terminated,
)
from moebatch.predict.learnt_files import (
    HABITS,
    LEARNED,
    load_first_gate,
    load_habits,
    load_learned,
    load_table,
    load_tokens,
)
from moebatch.predict.path_table import PathTable
from moebatch.predict.trace import RoutingTrace
from moebatch.spec.model import cache_layout
from moebatch.spec.policy.policy import PAGE_TOKENS, PredictorName
from tests.command import moebatch
from tests.gguf_models import write_gguf
from tests.model.pregated import block_of, moe_layers_of, router_of
from tests.patience import until
from tests.tiny import CACHED_APART, write_checkpoint

Checkpoint = Callable[..., Path]
TEXT = "".join(
    f"The {noun} counts {number} of the letters, and the city {verb} it.\n"
    for number in range(6)
    for noun in ("river", "lamp", "engine")
    for verb in ("finds", "opens")
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SEQUENCE_TOKENS", 60)


def run(
    order: CalibrationOrder,
    log: Callable[[str], None] = lambda line: None,
    advance: Callable[[float], None] = lambda share: None,
) -> CalibrationSummary:
    return Calibration(order, log, advance).execute()


def owner_of(model: Path) -> ModelOwner:
    return open_model(model, "auto").owner


def tokens_of(trace: RoutingTrace) -> int:
    return sum(experts_LTK.shape[1] for experts_LTK in trace.passes)


def routing_of_transformers(model: Path, num_tokens: int) -> list[np.ndarray[Any, Any]]:
    """What each sequence of 60 tokens of the text chooses, [L, T, K]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"][:num_tokens]
    chosen: list[torch.Tensor] = []

    def note(router: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        _, weights_TK, experts_TK = output
        chosen.append(experts_TK.gather(1, weights_TK.argsort(dim=-1, descending=True)))

    for layer in moe_layers_of(loaded):
        router_of(loaded, layer).register_forward_hook(note)
    found = []
    for start in range(0, len(tokens), 60):
        chosen.clear()
        with torch.inference_mode():
            loaded(torch.tensor([tokens[start : start + 60]]))
        found.append(torch.stack(chosen).numpy())
    return found


@pytest.mark.parametrize(
    ("family", "path_length"),
    [
        *(("mixtral", 2), ("gpt_oss", 1), ("deepseek_v3", 2), ("qwen3_next", 1)),
        *(("granitemoehybrid", 1), ("lfm2_moe", 1), ("kimi_linear", 1)),
        *(("minimax", 1), ("bailing_hybrid", 1)),
        *(("nemotron_h", 2), ("flex_olmo", 1), ("jamba", 1)),
    ],
)
def test_the_table_has_what_transformers_chooses(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint, family: str, path_length: int
) -> None:
    model = tiny_checkpoint(family)
    shape = open_model(model, "auto").shape
    output = tmp_path / "table"
    order = CalibrationOrder(
        model=model, text=text, path_length=path_length, num_tokens=700, output=output
    )
    summary = run(order)
    expected = PathTable.empty(
        shape.moe_layers,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        path_length=path_length,
    )
    for experts_LTK in routing_of_transformers(model, 700):
        expected.add_pass(experts_LTK)
    table = load_table(output, owner_of(model))
    assert table.num_tokens == summary.num_tokens == 700
    for one, other in zip(expected.counts, table.counts, strict=True):
        assert np.array_equal(one, other)


def test_the_trace_has_every_token_at_every_layer(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint
) -> None:
    model, output, path = tiny_checkpoint("olmoe"), tmp_path / "table", tmp_path / "trace"
    summary = run(
        CalibrationOrder(model=model, text=text, num_tokens=500, output=output, trace=path)
    )
    trace = RoutingTrace.load(path)
    assert tokens_of(trace) == summary.num_tokens == 500
    counted = PathTable.empty(trace.moe_layers, num_experts=8, experts_per_token=2)
    for experts_LTK in trace.passes:
        counted.add_pass(experts_LTK)
    table = load_table(output, owner_of(model))
    assert np.array_equal(counted.counts[1], table.counts[1])


def test_layers_without_experts_are_left_out(tmp_path: Path, text: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "qwen3_moe", mlp_only_layers=[1])
    run(CalibrationOrder(model=model, text=text, num_tokens=200))
    table = load_table(model / "moebatch/correlation.safetensors", owner_of(model))
    assert table.moe_layers == (0, 2)
    assert [int(counts.sum()) for counts in table.counts[0]] == [400, 400]
    assert int(table.counts[1][1].sum()) == 800


def test_accuracy_is_that_of_the_last_tenth(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint
) -> None:
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral"), text=text, num_tokens=600, output=tmp_path / "table"
    )
    summary = run(order)
    assert (summary.num_sequences, summary.num_held_out) == (10, 60)
    single, group = summary.comparisons
    assert (single.group_tokens, group.group_tokens) == (1, 64)
    assert [layer.layer for layer in single.correlation] == [0, 1, 2]
    for layer in (*single.correlation, *group.marginal):
        assert 0 < layer.took_part <= 1


def test_a_text_too_short_to_hold_something_out_is_counted_all_the_same(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint
) -> None:
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral"), text=text, num_tokens=60, output=tmp_path / "table"
    )
    summary = run(order)
    assert (summary.num_tokens, summary.num_held_out, summary.comparisons) == (60, 0, ())


def test_prompts_of_a_job_may_be_the_text(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    rows = [{"prompt": f"The river counts {i}"} for i in range(20)] + [{"no": "prompt"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_checkpoint("mixtral")
    summary = run(CalibrationOrder(model=model, text=path, output=tmp_path / "table"))
    assert summary.num_sequences == 20


def test_what_is_no_text_is_refused(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    empty, binary, bad_rows = tmp_path / "e.txt", tmp_path / "b.txt", tmp_path / "bad.jsonl"
    empty.touch()
    binary.write_bytes("é\n".encode() * 100_000 + b"\xff\xfe\x00")
    bad_rows.write_text('{"no": "prompt"}\n')
    for path, message in (
        (empty, "holds no text"),
        (binary, "is no UTF-8 text: invalid start byte at byte 300000; save it as UTF-8"),
        (tmp_path / "none.txt", "No such file"),
        (bad_rows, "bad.jsonl:1: "),
    ):
        with pytest.raises(InputError, match=message):
            run(
                CalibrationOrder(
                    model=tiny_checkpoint("mixtral"),
                    text=path,
                    num_tokens=2**20,
                    output=tmp_path / "table",
                )
            )
    assert not (tmp_path / "table").exists()


def test_a_model_of_one_position_reads_no_text(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = tiny_checkpoint("mixtral", max_position_embeddings=1)
    with pytest.raises(InputError, match="takes two positions, and the model has one"):
        run(CalibrationOrder(model=model, text=text, output=tmp_path / "table"))


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = write_checkpoint(tmp_path / "model")
    (model / "moebatch").touch()  # where the folder of the table should be
    text = tmp_path / "none.txt"
    with pytest.raises(StorageError, match=r"cannot be written: .*; give another place"):
        run(CalibrationOrder(model=model, text=text))
    with pytest.raises(StorageError, match="is a folder; give the path of a file"):
        run(CalibrationOrder(model=model, text=text, output=tmp_path))
    same = tmp_path / "table"
    with pytest.raises(ConfigError, match="--trace: is where the table goes"):
        run(CalibrationOrder(model=model, text=text, output=same, trace=same))


@pytest.mark.parametrize(
    ("output", "trace", "message"),
    [
        ("text.txt", None, "--output: is the text that is read; give another place"),
        ("table", "link", "--trace: is the text that is read"),
        ("table", "folder/../table", "--trace: is where the table goes"),
        ("habits.safetensors", None, "--output: is where the file of habits goes"),
        ("table", "tokens.safetensors", "--trace: is where the token table goes"),
        ("pre-gates.safetensors", None, "--output: is where the file of pre-gates goes"),
        ("table.lock", None, "--output: is where what is read is kept"),
        ("table", "table.reading", "--trace: is where what is read is kept"),
    ],
)
def test_what_is_read_or_written_is_not_written_over(
    tmp_path: Path,
    text: Path,
    tiny_checkpoint: Checkpoint,
    output: str,
    trace: str | None,
    message: str,
) -> None:
    (tmp_path / "link").symlink_to(text)
    (tmp_path / "folder").mkdir()
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral"),
        text=text,
        num_tokens=700,
        output=tmp_path / output,
        trace=trace and tmp_path / trace,
    )
    with pytest.raises(ConfigError, match=message):
        run(order)
    assert text.read_text() == TEXT
    assert {path.name for path in tmp_path.iterdir()} <= {"text.txt", "link", "folder", "table"}


@pytest.mark.parametrize("option", ["output", "trace"])
def test_only_what_a_calibration_has_written_is_written_over(
    tmp_path: Path, text: Path, option: str
) -> None:
    model, table, trace = write_checkpoint(tmp_path / "model"), tmp_path / "a", tmp_path / "b"
    order = CalibrationOrder(model=model, text=text, num_tokens=700, output=table, trace=trace)
    table.touch()  # as mktemp makes it
    run(order)
    run(order)
    (tmp_path / "link").symlink_to(model / "config.json")
    of_other_kind = tmp_path / "other"
    of_other_kind.write_bytes((trace if option == "output" else table).read_bytes())
    for path in (tmp_path / "link", model / "model.safetensors", of_other_kind):
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=rf"--{option}: {path} is there, and is no "):
            run(replace(order, **{"output": table, "trace": trace, option: path}))
        assert path.read_bytes() == before
    damaged = model / "moebatch" / "correlation.safetensors"
    damaged.parent.mkdir()
    damaged.write_bytes(b"damaged")
    assert run(replace(order, output=None)).table == damaged, "its name is not the user's choice"


def test_a_gguf_file_is_named_as_in_jobs(tmp_path: Path, text: Path) -> None:
    source = write_checkpoint(tmp_path / "plain", "mixtral")
    folder = write_gguf(source, tmp_path / "gguf", lambda name: "F16")
    order = CalibrationOrder(model=folder / "model.gguf", text=text, num_tokens=60)
    table = folder / "moebatch/correlation.safetensors"
    assert run(order).table == table
    assert run(replace(order, model=folder)).table == table
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        run(replace(order, model=tmp_path / "none.gguf"))


@pytest.mark.parametrize("asked", [{"gating": "adaptive"}, {"pregate": True}])
def test_models_whose_gates_cannot_learn_are_refused_before_anything_is_read(
    tmp_path: Path, tiny_checkpoint: Checkpoint, asked: dict[str, Any]
) -> None:
    source = write_checkpoint(tmp_path / "plain", "mixtral")
    for model, message in (
        (write_gguf(source, tmp_path / "gguf", lambda name: "F16"), "cannot learn from GGUF"),
        (tiny_checkpoint("gemma4_text"), "cannot be changed in transformers"),
        (tiny_checkpoint("longcat_flash"), "cannot be changed in transformers"),
    ):
        order = CalibrationOrder(
            model=model, text=tmp_path / "none.txt", output=tmp_path / "table", **asked
        )
        with pytest.raises(CheckpointError, match=message):
            run(order)


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("minimax_m2", {"pregate": True}, "pre-gates cannot learn"),
        ("qwen3_vl_moe", {"pregate": True}, "transformers cannot load it"),
        ("qwen3_vl_moe", {"gating": "adaptive"}, "transformers cannot load it"),
        ("qwen3_omni_moe_thinker", {"pregate": True}, "transformers cannot load it"),
        ("step3p7", {"gating": "adaptive"}, "transformers cannot load it"),
        ("glm4v_moe", {"pregate": True}, "transformers cannot load it"),
        ("hy_v4_vl", {"pregate": True}, "transformers cannot load it"),
        ("mistral_large4", {"pregate": True}, "transformers cannot load it"),
        ("glm5_next", {"pregate": True}, "transformers cannot load it"),
        ("ernie4_5_vl_moe", {"gating": "adaptive"}, "transformers cannot load it"),
        ("minimax_m3_vl", {"pregate": True}, "transformers cannot load it"),
        ("muse_spark", {"gating": "adaptive"}, "transformers cannot load it"),
        ("nemotron_h_omni", {"pregate": True}, "transformers cannot load it"),
    ],
)
def test_what_transformers_cannot_do_with_gates_is_refused_before_anything_is_read(
    tmp_path: Path, tiny_checkpoint: Checkpoint, family: str, asked: dict[str, Any], message: str
) -> None:
    order = CalibrationOrder(
        model=tiny_checkpoint(family),
        text=tmp_path / "none.txt",
        output=tmp_path / "table",
        **asked,
    )
    with pytest.raises(CheckpointError, match=message):
        run(order)


def test_gates_of_the_only_layer_with_experts_have_no_later_one(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral", num_hidden_layers=1),
        text=tmp_path / "none.txt",
        output=tmp_path / "table",
        pregate=True,
    )
    with pytest.raises(ConfigError, match="--pregate: gates choose for a later layer"):
        run(order)


def test_a_budget_that_is_too_small_is_refused(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint
) -> None:
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral"), text=text, dram="1MiB", output=tmp_path / "table"
    )
    with pytest.raises(DoesNotFit, match=r"dram: needs [^$]*resources.dram is --dram"):
        run(order)


def test_what_only_an_approximation_takes_is_refused_without_it(text: Path) -> None:
    order = CalibrationOrder(model=Path("model"), text=text, loss=0.1, level=2)
    with pytest.raises(ConfigError) as caught:
        order.require_consistent()
    assert str(caught.value).splitlines() == [
        "moebatch calibrate: --loss: is for --gating adaptive only",
        "moebatch calibrate: --level: is for --pregate only",
    ]
    replace(order, gating="adaptive", pregate=True).require_consistent()


def test_a_model_that_is_not_there_gets_no_folder(tmp_path: Path, text: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model folder"):
        run(CalibrationOrder(model=tmp_path / "none", text=text))
    assert not (tmp_path / "none").exists()


def test_the_command_writes_a_table_and_reports_its_accuracy(tmp_path: Path, text: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    text.write_text(TEXT * 4)
    done = moebatch("calibrate", model, "--text", text, "--dram", "2GiB")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    for word in ("read", "moebatch/correlation.safetensors", "1 token: chosen", "mean", "%"):
        assert word in done.stderr
    left = {path.name for path in (model / "moebatch").iterdir()}
    assert left == {"correlation.safetensors", "habits.safetensors"}
    again = moebatch("calibrate", model, "--text", text, "--quiet", "--dram", "2GiB")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_the_command_wants_a_text_and_a_size() -> None:
    done = moebatch("calibrate", "model")
    assert done.returncode == 2
    assert "--text: is needed: a text like those of your jobs" in done.stderr
    done = moebatch("calibrate", "model", "--text", "t.txt", "--dram", "much")
    assert done.returncode == 2
    assert "--dram: expected a size such as 12GiB" in done.stderr


def test_predictors_learn_and_are_examined_on_what_was_held_out(tmp_path: Path, text: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "mixtral")
    summary = run(CalibrationOrder(model=model, text=text, num_tokens=1500, predictor=("all",)))
    by_name = {lesson.name: lesson for lesson in summary.lessons}
    assert list(by_name) == ["token", "next-gate", "learned"]
    layers = list(open_model(model, "auto").shape.moe_layers)
    assert all(list(lesson.accuracy) == layers for lesson in by_name.values())
    for lesson in summary.lessons:
        assert lesson.file.parent == model / "moebatch"
        assert all(0 <= share <= 1 for share in lesson.accuracy.values())
    shape, owner = open_model(model, "auto").shape, owner_of(model)
    load_learned(by_name["learned"].file, owner, hidden_size=shape.hidden_size)
    load_first_gate(by_name["next-gate"].file, owner, hidden_size=shape.hidden_size)
    load_tokens(by_name["token"].file, owner, vocab_size=shape.vocab_size)
    left = {path.name for path in (model / "moebatch").iterdir()}
    names = ("correlation", "habits", "tokens", "first-gate", "learned")
    assert left == {f"{name}.safetensors" for name in names}, "no traces are left behind"


@pytest.mark.few(family=("mixtral", "deepseek_v3"))
@pytest.mark.parametrize(
    "family",
    [
        *(*CACHED_APART, "granitemoehybrid", "lfm2_moe", "kimi_linear", "minimax"),
        *("nemotron_h", "flex_olmo", "bailing_hybrid", "hy_v4", "jamba", "axk2"),
    ],
)
def test_the_gate_of_the_next_layer_is_asked_with_what_this_one_saw(
    tmp_path: Path, text: Path, family: str
) -> None:
    """Held against transformers' own gates and hidden states."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_checkpoint(tmp_path / "model", family, dtype="float32")
    order = CalibrationOrder(model=model, text=text, num_tokens=600, predictor=("next-gate",))
    (lesson,) = run(order).lessons
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"][540:600]
    seen: list[torch.Tensor] = []
    *_, before, last = moe_layers_of(loaded)
    for layer in (before, last):
        block = block_of(loaded, layer)
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    router, beside = router_of(loaded, last), []
    router.register_forward_pre_hook(lambda module, inputs: beside.append(inputs[1:]))
    with torch.inference_mode():
        loaded(torch.tensor([tokens]))
        (_, _, guessed), (_, _, chosen) = (router(each, *beside[0]) for each in seen)
    right = (guessed[:, :, None] == chosen[:, None, :]).any(dim=2).float().mean()
    *_, number = lesson.accuracy  # files may have another
    assert lesson.accuracy[number] == pytest.approx(float(right), abs=1e-6)


def test_what_an_earlier_calibration_has_taught_stays_known(tmp_path: Path, text: Path) -> None:
    """As long as it is there, with what it was worth then."""
    model = write_checkpoint(tmp_path / "model", "mixtral")
    order = CalibrationOrder(model=model, text=text, num_tokens=900, predictor=("all",))
    run(order)

    def known() -> dict[PredictorName, tuple[float, ...]]:
        return dict(load_habits(HABITS.path(model), owner_of(model)).accuracy)

    first = known()
    assert set(first) == {"none", "correlation", "token", "next-gate", "learned"}
    LEARNED.path(model).unlink()
    run(replace(order, predictor=("token",), num_tokens=700))
    again = known()
    assert set(again) == {"none", "correlation", "token", "next-gate"}
    assert again["next-gate"] == first["next-gate"] and again["token"] != first["token"]


def test_a_predictor_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of correlation, token"):
        asked = CalibrationOrder(model=Path("m"), text=Path("t"), predictor=("oracle",))
        asked.require_consistent()


def test_nothing_that_was_held_out_is_learnt_from_where_rows_begin_alike(
    tmp_path: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What prompts have in common is computed once, so the trace is shorter than the text."""
    rows = tmp_path / "rows.jsonl"
    common = "the river counts the letters of the city " * 2
    rows.write_text(
        "".join(f'{{"prompt": "{common}{number} {number * 7}"}}\n' for number in range(40))
    )
    found: list[Teacher] = []
    teach = Teacher.teach
    monkeypatch.setattr(
        Teacher, "teach", lambda teacher, *rest: (found.append(teacher), teach(teacher, *rest))[1]
    )
    summary = run(
        CalibrationOrder(
            model=tiny_checkpoint("mixtral"),
            text=rows,
            output=tmp_path / "table",
            predictor=("token",),
        )
    )
    (teacher,) = found
    assert len(teacher.known) + len(teacher.unseen) < summary.num_tokens, "beginnings are shared"
    assert 0 < len(teacher.unseen) <= summary.num_held_out
    assert teacher.unseen.is_first_N[0], "it begins with a sequence"


def test_rows_are_kept_apart_where_a_window_forgets_their_beginnings(
    tmp_path: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that an engine adds to the longest row is what the window has no room for."""
    monkeypatch.setattr(cache_layout, "LARGEST_SLICE", 32)
    model, rows = tiny_checkpoint("gpt_oss"), tmp_path / "rows.jsonl"
    longest = min(group.most_rows for group in open_model(model, "auto").shape.cache_groups(512))
    assert 2 * PAGE_TOKENS <= longest <= 60, "a page that rows could share"
    prompts = [[5] * (longest - 1) + [number] for number in range(20, 40)] + [[7] * 10]
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    trace = tmp_path / "trace"
    summary = run(CalibrationOrder(model=model, text=rows, output=tmp_path / "t", trace=trace))
    assert summary.num_tokens == 20 * longest + 10 == tokens_of(RoutingTrace.load(trace))


def test_a_token_table_that_is_too_large_is_refused_before_anything_is_read(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons, "MAX_TABLE_BYTES", 1000)
    order = CalibrationOrder(
        model=tiny_checkpoint("mixtral"),
        text=text,
        output=tmp_path / "table",
        predictor=("token",),
    )
    with pytest.raises(ConfigError, match="name the others"):
        run(order)


def broken_off(order: CalibrationOrder, share: float) -> list[str]:
    """Ctrl-C when so much of the text is read; what the user was told."""
    lines: list[str] = []

    def advance(done: float) -> None:
        if done > share:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(order, lines.append, advance)
    return lines


def flip(path: Path) -> None:
    """Changes a bit in the middle of what is there."""
    data = bytearray(path.read_bytes())
    data[len(data) // 8] ^= 1
    path.write_bytes(data)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a portion is two sequences."""
    monkeypatch.setattr(reading_policy, "_MOST_PASS_TOKENS", 128)


@pytest.fixture
def order(
    tmp_path: Path, text: Path, tiny_checkpoint: Checkpoint, short_passes: None
) -> CalibrationOrder:
    folder = tmp_path / "kept"
    return CalibrationOrder(
        model=tiny_checkpoint("mixtral"),
        text=text,
        num_tokens=780,
        output=folder / "table",
        trace=folder / "trace",
        predictor=("token",),
    )


def test_one_that_was_broken_off_ends_as_if_it_had_not_been(
    tmp_path: Path, order: CalibrationOrder
) -> None:
    """Twice, in the middle of a portion of what is counted and of what is held out."""
    broken_off(order, 0.45)
    broken_off(order, 0.95)
    lines: list[str] = []
    summary = run(order, lines.append)
    assert any("720 of 780 tokens have been read before" in line for line in lines)
    assert summary.num_passes == 1
    other = tmp_path / "undisturbed"
    expected = run(replace(order, output=other / "table", trace=other / "trace"))
    assert files_in(order.table.parent) == files_in(other)
    assert summary.comparisons == expected.comparisons
    assert [one.accuracy for one in summary.lessons] == [one.accuracy for one in expected.lessons]


def test_rows_that_begin_alike_are_counted_once_wherever_it_was_broken_off(
    tmp_path: Path, order: CalibrationOrder
) -> None:
    """A pass shares what it finds computed, and after a stop nothing is."""
    rows, common = tmp_path / "rows.jsonl", "the river counts the letters of the city " * 2
    rows.write_text("".join(f'{{"prompt": "{common}{n} {n * 7}"}}\n' for n in range(40)))
    order = replace(order, text=rows)
    broken_off(order, 0.5)
    summary = run(order)
    other = tmp_path / "undisturbed"
    run(replace(order, output=other / "table", trace=other / "trace"))
    assert files_in(order.table.parent) == files_in(other)
    assert tokens_of(RoutingTrace.load(other / "trace")) < summary.num_tokens * 0.6


def test_another_text_or_a_damaged_file_begins_anew(
    tmp_path: Path, order: CalibrationOrder, text: Path
) -> None:
    other = tmp_path / "undisturbed"
    run(replace(order, output=other / "table", trace=other / "trace"))
    reading = order.table.parent / "table.reading"
    broken_off(replace(order, num_tokens=600), 0.5)
    for change, said in (
        (lambda: None, "is of another reading; the text is read from its beginning"),
        (lambda: flip(reading / "record"), "record: is damaged; the text is read"),
        (lambda: flip(reading / "hidden"), "reading: is damaged; the text is read"),
    ):
        change()
        lines = broken_off(order, 0.5)
        assert sum(said in line for line in lines) == 1, lines
        assert not any("read before" in line for line in lines)
    run(order)
    assert files_in(order.table.parent) == files_in(other)


def test_a_predictor_that_has_learnt_is_not_taught_again(
    order: CalibrationOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = replace(
        order,
        predictor=(
            "token",
            "next-gate",
        ),
    )
    taught: list[str] = []
    token, next_gate = Teacher._token, Teacher._next_gate

    def learn_token(teacher: Teacher, *rest: Any) -> lessons.Accuracy:
        taught.append("token")
        return token(teacher, *rest)

    def learn_next_gate(teacher: Teacher, *rest: Any) -> lessons.Accuracy:
        taught.append("next-gate")
        if taught.count("next-gate") == 1:
            raise KeyboardInterrupt
        return next_gate(teacher, *rest)

    monkeypatch.setattr(Teacher, "_token", learn_token)
    monkeypatch.setattr(Teacher, "_next_gate", learn_next_gate)
    with pytest.raises(KeyboardInterrupt):
        run(order)
    summary = run(order)
    assert taught == ["token", "next-gate", "next-gate"]
    assert summary.num_passes == 0, "nothing is read again"
    assert [lesson.name for lesson in summary.lessons] == ["token", "next-gate"]
    assert all(lesson.accuracy for lesson in summary.lessons)


def test_two_at_a_time_do_not_write_the_same_table(order: CalibrationOrder) -> None:
    order.table.parent.mkdir()
    with (
        reading_folder(order.table).locked(),
        pytest.raises(LockHeld, match=r"table: another run is using it .* choose another --output"),
    ):
        run(order)
    assert not list(order.table.parent.iterdir())


class Finalised:
    """Sends a signal to its process: what the handler raises gets no further."""

    def __init__(self, name: str) -> None:
        self._number = getattr(signal, name)

    def __del__(self) -> None:
        signal.raise_signal(self._number)


@pytest.mark.parametrize("is_held_back", [False, True])
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("SIGTERM", Terminated, "ended by SIGTERM"),
        ("SIGHUP", Terminated, "ended by SIGHUP"),
        ("SIGINT", Interrupted, "stopped by Ctrl-C"),
    ],
)
def test_a_signal_ends_it_with_what_is_kept(
    order: CalibrationOrder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    error: type[MoebatchError],
    said: str,
    is_held_back: bool,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)

    def stop(calibration: Calibration) -> CalibrationSummary:
        if is_held_back:
            Finalised(name)
        else:
            signal.raise_signal(getattr(signal, name))
        until(lambda: False)
        raise AssertionError("goes on")

    monkeypatch.setattr(Calibration, "execute", stop)
    monkeypatch.setattr(Calibration, "num_kept", 360)
    before = signal.getsignal(signal.SIGTERM)
    # A process that was started in the background ignores Ctrl-C.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(error, match=f"{said}; 360 tokens are read and kept: the same command"):
        carried_out(
            partial(Calibration, order), doing="reading", kept="tokens are read", quiet=True
        )
    signal.signal(signal.SIGINT, usual)
    assert signal.getsignal(signal.SIGTERM) == before
    assert sys.unraisablehook is sys.__unraisablehook__
    assert capsys.readouterr().err == ""
