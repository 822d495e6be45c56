"""Problems that tests of the planner ask."""

from dataclasses import replace

from moebatch.formats.plain import BFLOAT16
from moebatch.layout.footprint import Dtypes
from moebatch.plan.problem import Problem
from moebatch.plan.search.affine import AffineCandidate
from moebatch.plan.search.bounds import Bounds, bounds, by_hand
from moebatch.plan.search.candidates import candidates
from moebatch.plan.search.known import Known
from moebatch.plan.search.planner import Screened, screen
from moebatch.plan.search.ranking import ranked_among
from moebatch.spec.machine.hardware import Hardware, Level, Link, Processor, RateCurve
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.workload import Workload

GIB = 2**30
GB = 1e9
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
SHAPE = read_shape(MIXTRAL, "config.json")
SMALL = read_shape(
    {**MIXTRAL, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 8}, "small"
)
GIVING_BACK = replace(SHAPE, router=replace(SHAPE.router, num_identities=8))
"""Half of its choices compute nothing."""
WORKLOAD = Workload(
    num_sequences=5000, mean_prompt_tokens=77, mean_new_tokens=128, max_total_tokens=546
)


def processor(flops: float, bandwidth: float) -> Processor:
    """The same rate at every number of rows; attention and the rest at memory speed."""
    return Processor(
        gemm={"bfloat16": RateCurve(((1, flops),))},
        bandwidth=bandwidth,
        attention_bandwidth=bandwidth / 2,
        attention_flops=flops / 2,
        elementwise_bandwidth=bandwidth / 2,
        sequence_s=20e-6,
    )


def cpu_machine(dram_gib: float = 16, *, disk: float = 2 * GB, flops: float = 1e12) -> Hardware:
    """A machine without a GPU."""
    return Hardware(
        name="cpu",
        title="",
        levels={
            "dram": Level(
                name="dram", capacity_bytes=int(dram_gib * GIB), processor=processor(flops, 30 * GB)
            ),
            "disk": Level(name="disk", capacity_bytes=500 * GIB),
        },
        links={
            "disk->dram": Link(name="disk->dram", bandwidth=disk),
            "dram->disk": Link(name="dram->disk", bandwidth=disk / 2),
        },
    )


def gpu_machine(
    vram_gib: float = 15, dram_gib: float = 180, *, link: float = 12 * GB, disk: float = 2 * GB
) -> Hardware:
    """A small GPU in a large host."""
    host = cpu_machine(dram_gib, disk=disk)
    vram = Level(
        name="vram", capacity_bytes=int(vram_gib * GIB), processor=processor(40e12, 250 * GB)
    )
    links = {
        "dram->vram": Link(name="dram->vram", bandwidth=link, staging_bandwidth=8 * GB),
        "vram->dram": Link(name="vram->dram", bandwidth=link),
    }
    return replace(host, levels={"vram": vram, **host.levels}, links={**host.links, **links})


def launching(hardware: Hardware) -> Hardware:
    """The same machine, whose GPU takes some time to be asked for anything."""
    vram = hardware.levels["vram"]
    assert vram.processor is not None
    slower = replace(vram.processor, launch_s=10e-6, task_s=40e-6, another_expert_s=10e-6)
    return replace(hardware, levels={**hardware.levels, "vram": replace(vram, processor=slower)})


def problem(
    hardware: Hardware | None = None,
    *,
    shape: ModelShape = SHAPE,
    workload: Workload = WORKLOAD,
    kv_on_disk: bool = True,
) -> Problem:
    """A Mixtral on a machine with 16 GiB unless told otherwise."""
    return Problem(
        shape=shape,
        dtypes=Dtypes(stored=BFLOAT16, compute="bfloat16"),
        hardware=hardware or cpu_machine(),
        workload=workload,
        kv_on_disk=kv_on_disk,
    )


def bounds_of(asked: Problem, item: AffineCandidate) -> Bounds:
    """What a candidate takes at the least and at the most."""
    return bounds(asked, item, by_hand(asked, item.candidate, item.memory))


def screened_of(asked: Problem) -> list[Screened]:
    """Candidates that a planner would look at closely."""
    known = Known(asked)
    return screen(asked, ranked_among(known, candidates(asked)), known)
