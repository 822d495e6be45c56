"""What MoE-Lightning's planner is asked, and the sizes that follow from it."""

from dataclasses import dataclass

from moebatch.errors import ConfigError, Fault
from moebatch.spec.hardware import Hardware, Level, Processor
from moebatch.spec.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperProblem:
    """One model, machine and workload.

    Every layer is taken to have experts, and nothing beside them but attention. Raises ConfigError
    for machines without a GPU.
    """

    shape: ModelShape
    hardware: Hardware
    prompt_tokens: float
    """s: the mean, or the longest if prompts are padded."""
    gen_tokens: float
    """n."""

    def __post_init__(self) -> None:
        assert self.prompt_tokens > 0 and self.gen_tokens > 0, "prompts and answers have tokens"
        for level, where in ((self.hardware.vram, "vram"), (self.hardware.dram, "dram")):
            if level is None or level.processor is None:
                self._refuse(f"levels.{where}", "and its processor")
        if "dram->vram" not in self.hardware.links:
            self._refuse("links.dram->vram", "")

    @property
    def weights_bytes(self) -> int:
        """W_e: the experts of one layer."""
        return self.shape.num_experts * self.shape.expert_stored_bytes

    @property
    def attention_weights_bytes(self) -> int:
        """W_o: the projections of attention of all layers, always on the GPU."""
        return self.dtype_bytes * self.shape.attention_params * self.shape.num_layers

    def kv_bytes(self, sequences: float, tokens: float) -> float:
        """Keys and values of one layer."""
        return self.dtype_bytes * self.shape.cache_width * sequences * tokens

    def hidden_bytes(self, tokens: float) -> float:
        """Hidden states of so many tokens."""
        return self.dtype_bytes * self.shape.hidden_size * tokens

    @property
    def total_tokens(self) -> float:
        """s + n."""
        return self.prompt_tokens + self.gen_tokens

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number."""
        return self.shape.dtype_bytes

    @property
    def num_gpus(self) -> int:
        """GPUs over which every layer is split; memory, bandwidth and peak are of all together."""
        return self.vram.num_devices

    @property
    def vram(self) -> Level:
        """GPU memory."""
        assert self.hardware.vram is not None, "checked when the problem was made"
        return self.hardware.vram

    @property
    def gpu(self) -> Processor:
        """All GPUs together."""
        assert self.vram.processor is not None, "checked when the problem was made"
        return self.vram.processor

    @property
    def cpu(self) -> Processor:
        """The processor at main memory."""
        assert self.hardware.dram.processor is not None, "checked when the problem was made"
        return self.hardware.dram.processor

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second on the way up to the GPU."""
        return self.hardware.links["dram->vram"].bandwidth

    def _refuse(self, where: str, beside: str) -> None:
        message = (
            f"missing {beside}".strip() + ": MoE-Lightning's planner is for a GPU beside a CPU; "
            "plan without --paper, or for a machine with a GPU"
        )
        raise ConfigError([Fault(file=self.hardware.name, where=where, message=message)])
