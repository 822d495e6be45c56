"""Plain checkpoints made into quantised ones, each with what upstream's code decodes it to.

Shape letters: O outputs, I inputs, E experts.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations import finegrained_fp8, mxfp4

from tests.model.driver import read_tensors

E4M3_MOST, E2M1_MOST = 448.0, 6.0
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a weight [O, I] by their suffixes, and the weight that they stand for."""


@dataclass(frozen=True)
class Kind:
    """A way to store weights."""

    store: Callable[[Tensor], Stored]
    config: Mapping[str, Any]
    format: str
    """As moebatch describes it."""
    dense: bool = field(default=True)
    """Weights outside experts are stored so as well, where it is asked for."""


def write_quantised(
    source: Path,
    kind: str,
    target: Path,
    *,
    dense: bool = False,
    shards: bool = False,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Makes the folder `target` of the plain one, with experts of that kind, and beside it
    ``TARGET-decoded``, a plain one of the weights that they stand for.

    `dense` are all other matrices of layers but routers; with `shards` codes and scales are in
    different files; ``config.json`` says of them `said` beside what is needed. Experts that lie
    transposed in the plain one do not where they are quantised, as gpt-oss has them.
    """
    is_across = json.loads((source / "config.json").read_text())["model_type"] == "gpt_oss"
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, tensor in read_tensors(source).items():
        if is_quantised(name, tensor, dense=dense and KINDS[kind].dense):
            lies_across = is_across and tensor.dim() == 3
            parts, weight = _stored(KINDS[kind], tensor.mT if lies_across else tensor)
            decoded[name] = weight.mT if lies_across else weight
            stored |= {_named(name, suffix): part for suffix, part in parts.items()}
        else:
            stored[name] = decoded[name] = tensor
    _write(source, target, stored, shards=shards)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {**KINDS[kind].config, **said}
    (target / "config.json").write_text(json.dumps(config))
    _write(source, decoded_beside(target), decoded)
    return target


def decoded_beside(folder: Path) -> Path:
    """The plain checkpoint of the weights that a quantised one stands for."""
    return folder.parent / f"{folder.name}-decoded"


def is_quantised(name: str, tensor: Tensor, *, dense: bool) -> bool:
    """Whether a tensor of a tiny checkpoint is stored otherwise."""
    if (
        tensor.dim() < 2
        or name.endswith(("bias", "conv1d.weight", "A_log", "slope_rate", "_decay"))
        or ".gate.weight" in name
        or "shared_expert_gate" in name
    ):
        return False
    if any(recurs in name for recurs in ("linear_attn", ".mamba.", ".conv.")):
        ends = ("in_proj_qkvz.weight", "in_proj.weight", "out_proj.weight")
        return dense and name.endswith(ends)
    own = ("self_attn", ".mlp.", ".shared_mlp.", ".feed_forward.")
    of_experts = ("experts.", ".moe.", "block_sparse_moe.input", "block_sparse_moe.output")
    return any(each in name for each in of_experts) or (dense and any(e in name for e in own))


def _named(name: str, suffix: str) -> str:
    return name.removesuffix(".weight") + suffix if suffix.startswith(".") else name + suffix


def _stored(kind: Kind, tensor: Tensor) -> Stored:
    if tensor.dim() == 2:
        return kind.store(tensor.float())
    parts, decoded = zip(*map(kind.store, tensor.float()), strict=True)
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}, torch.stack(
        decoded
    )


def _write(source: Path, target: Path, tensors: Mapping[str, Tensor], shards: bool = False) -> None:
    target.mkdir()
    for path in source.glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, target)
    if not shards:
        save_file(
            {name: each.contiguous() for name, each in tensors.items()},
            target / "model.safetensors",
        )
        return
    files = {name: f"part-{'scale' in name or 'zero' in name:d}.safetensors" for name in tensors}
    for file in set(files.values()):
        own = {name: each.contiguous() for name, each in tensors.items() if files[name] == file}
        save_file(own, target / file)
    index = {"weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def blocks_of(weight_OI: Tensor, rows: int, columns: int) -> Tensor:
    """The weight in blocks [down, across, rows, columns], padded with zeros."""
    O, I = weight_OI.shape
    padded = torch.zeros(-(-O // rows) * rows, -(-I // columns) * columns)
    padded[:O, :I] = weight_OI
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)


def largest(weight_OI: Tensor, rows: int, columns: int) -> Tensor:
    """Of each block [down, across]; never zero."""
    return blocks_of(weight_OI, rows, columns).abs().amax((2, 3)).clamp_min(1e-3)


def _spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def fp8_blocks(
    rows: int, columns: int, *, suffix: str = "_scale_inv", power: bool = False
) -> Callable[[Tensor], Stored]:
    """FP8 in blocks; with `power` scales are powers of two in a byte each."""

    def store(weight_OI: Tensor) -> Stored:
        scales = largest(weight_OI, rows, columns) / E4M3_MOST
        stored = scales
        if power:
            stored = (scales.log2().ceil() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
            scales = stored.float()
        codes = (weight_OI / _spread(scales, rows, columns, weight_OI.shape)).to(
            torch.float8_e4m3fn
        )
        decoded = finegrained_fp8._dequantize_fp8_weight(
            codes, scales, [rows, columns], torch.float32
        )
        return {"": codes, suffix: stored}, decoded

    return store


def fp8_whole(shape: tuple[int, ...]) -> Callable[[Tensor], Stored]:
    """FP8 with a scale for the matrix."""

    def store(weight_OI: Tensor) -> Stored:
        scale = weight_OI.abs().max() / E4M3_MOST
        codes = (weight_OI / scale).to(torch.float8_e4m3fn)
        decoded = finegrained_fp8._dequantize_fp8_weight(codes, scale, None, torch.float32)
        return {"": codes, "_scale_inv": scale.view(shape).clone()}, decoded

    return store


def compressed(
    compressor: Any, *, scale_dtype: torch.dtype = torch.bfloat16, **arguments: Any
) -> Callable[[Tensor], Stored]:
    """As compressed-tensors compresses and decompresses. It wants whole groups: the weight is
    padded before, and what it makes of the padding is cut off."""
    arguments = {"symmetric": True, "strategy": "group"} | arguments
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def store(weight_OI: Tensor) -> Stored:
        O, I = weight_OI.shape
        group = arguments.get("group_size") or I
        padded = torch.zeros(O, -(-I // group) * group)
        padded[:, :I] = weight_OI
        state = {"weight": padded, **_scales(padded, group, arguments, scale_dtype)}
        packed = compressor.compress(state, scheme)
        decoded = compressor.decompress(packed, scheme)["weight"][:, :I].float()
        cut = {name.removeprefix("weight"): part for name, part in packed.items()}
        width = {"_packed": -(-I * arguments["num_bits"] // _word_bits(compressor)), "": I}
        for name, columns in width.items():
            if name in cut:
                cut[name] = cut[name][:, :columns]
        if "_shape" in cut:
            cut["_shape"] = torch.tensor([O, I])
        return cut, decoded

    return store


def _word_bits(compressor: Any) -> int:
    return 32 if compressor is PackedQuantizationCompressor else 8


def _scales(
    weight_OI: Tensor, group: int, arguments: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    bits, is_float = arguments["num_bits"], arguments["type"] == "float"
    if arguments["strategy"] == "block":
        return {
            "weight_scale": (largest(weight_OI, *arguments["block_structure"]) / E4M3_MOST).to(
                dtype
            )
        }
    groups = weight_OI.unflatten(1, (-1, group))
    most = groups.abs().amax(-1).clamp_min(1e-3)
    if is_float and bits == 4 and group == 16:
        overall = E4M3_MOST * E2M1_MOST / weight_OI.abs().max()
        local = (most / E2M1_MOST * overall).to(torch.float8_e4m3fn).float()
        return {"weight_scale": local, "weight_global_scale": overall.view(1)}
    if is_float and group == 32:  # a power of two
        return {"weight_scale": 2 ** (most / (E2M1_MOST if bits == 4 else E4M3_MOST)).log2().ceil()}
    if is_float:
        return {"weight_scale": (most / E4M3_MOST).to(dtype)}
    if arguments["symmetric"]:
        return {"weight_scale": (most / (2 ** (bits - 1) - 1)).to(dtype)}
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low).clamp_min(1e-3) / (2**bits - 1)).to(dtype)
    zero = (-(2 ** (bits - 1)) - low / scale.float()).round().to(torch.int8)
    return {"weight_scale": scale, "weight_zero_point": zero}


def mxfp4_blocks(weight_OI: Tensor) -> Stored:
    """As gpt-oss stores experts, the last block padded."""
    I = weight_OI.shape[1]
    blocks = blocks_of(weight_OI, 1, 32)[:, :, 0]
    powers = (blocks.abs().amax(-1).clamp_min(1e-3) / E2M1_MOST).log2().ceil()
    codes = _e2m1(blocks / 2 ** powers[..., None])
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    scales = (powers + 127).to(torch.uint8)
    decoded = mxfp4._convert_moe_packed_tensors(packed[None], scales[None], dtype=torch.float32)
    return {"_blocks": packed, "_scales": scales}, decoded[0].T[:, :I].contiguous()


def nvfp4_of_modelopt(weight_OI: Tensor) -> Stored:
    """No code of upstream's runs here: it is compressed-tensors' NVFP4 with the inverse scale."""
    parts, _ = compressed(
        NVFP4PackedCompressor, num_bits=4, type="float", strategy="tensor_group", group_size=16
    )(weight_OI)
    codes, local, overall = parts["_packed"], parts["_scale"], 1 / parts["_global_scale"]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : weight_OI.shape[1]]
    signed = torch.where(numbers > 7, -1.0, 1.0) * values[(numbers & 7).int()]
    scales = (local.float() * overall).repeat_interleave(16, 1)[:, : weight_OI.shape[1]]
    stored = {"": codes, "_scale": local, "_scale_2": overall.view(())}
    return stored, signed * scales


def deepseek_fp4(weight_OI: Tensor) -> Stored:
    """DeepSeek-V4's experts: MXFP4 under other names."""
    parts, decoded = mxfp4_blocks(weight_OI)
    codes = parts["_blocks"].flatten(1)[:, : -(-weight_OI.shape[1] // 2)]
    return {
        "": codes.view(torch.int8),
        ".scale": parts["_scales"].view(torch.float8_e8m0fnu),
    }, decoded


def gptq(
    bits: int, group: int, *, ordered: bool = False, second: bool = False, symmetric: bool = True
) -> Callable[[Tensor], Stored]:
    """GPTQ's words. Its own code cannot be run here: the formula is its documentation's."""

    def store(weight_OI: Tensor) -> Stored:
        I = weight_OI.shape[1]
        order_I = torch.arange(I) // group
        if ordered:
            order_I = order_I[torch.randperm(I, generator=torch.Generator().manual_seed(I))]
        codes_IO, zeros_GO, scales_GO = _grouped(weight_OI, order_I, bits, symmetric)
        decoded = (codes_IO - zeros_GO[order_I]).half() * scales_GO[order_I]
        stored = zeros_GO if second else (zeros_GO - 1) & (1 << bits) - 1
        return {
            ".qweight": _words(codes_IO.T, bits).T,
            ".qzeros": _words(stored, bits),
            ".scales": scales_GO,
            ".g_idx": order_I.int(),
        }, decoded.T.float()

    return store


def awq(group: int) -> Callable[[Tensor], Stored]:
    """AWQ's words (gemm). Its own code cannot be run here."""

    def store(weight_OI: Tensor) -> Stored:
        I = weight_OI.shape[1]
        order_I = torch.arange(I) // group
        codes_IO, zeros_GO, scales_GO = _grouped(weight_OI, order_I, 4, False)
        decoded = (codes_IO - zeros_GO[order_I]).half() * scales_GO[order_I]

        def shuffled(codes: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
            return padded.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

        return {
            ".qweight": _words(shuffled(codes_IO), 4),
            ".qzeros": _words(shuffled(zeros_GO), 4),
            ".scales": scales_GO,
        }, decoded.T.float()

    return store


def codebook(
    kind: str, dtype: torch.dtype, *, block: int = 64, nested: bool = False
) -> Callable[[Tensor], Stored]:
    """As bitsandbytes stores four bits, by its formula; the weight was of that type before."""
    values = torch.tensor(_CODEBOOKS[kind])

    def store(weight_OI: Tensor) -> Stored:
        count = weight_OI.numel()
        numbers = torch.zeros(-(-count // block), block)
        numbers.view(-1)[:count] = weight_OI.flatten()
        scales = numbers.abs().amax(1).clamp_min(1e-3)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block}
        state |= {"dtype": str(dtype).removeprefix("torch."), "shape": list(weight_OI.shape)}
        parts, read = {".weight.absmax": scales}, scales
        if nested:
            parts, read, added = _nested(scales)
            state |= added
        codes = (numbers / scales[:, None])[..., None] - values
        codes = codes.abs().argmin(-1).to(torch.uint8)
        decoded = (values[codes.int()] * read[:, None]).flatten()[:count].view(weight_OI.shape)
        pairs = torch.nn.functional.pad(codes.flatten()[:count], (0, count % 2)).view(-1, 2)
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        return {
            "": pairs[:, :1] << 4 | pairs[:, 1:],
            ".weight.quant_map": values.clone(),
            f".weight.quant_state.bitsandbytes__{kind}": text,
            **parts,
        }, decoded.to(dtype).float()

    return store


def _nested(scales: Tensor) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Scales in eight bits: tensors, what they stand for, and entries of the text."""
    offset = scales.mean()
    blocks = torch.zeros(-(-len(scales) // 256), 256)
    blocks.view(-1)[: len(scales)] = scales - offset
    overall, values = blocks.abs().amax(1).clamp_min(1e-3), torch.linspace(-1, 1, 256) ** 3
    codes = ((blocks / overall[:, None])[..., None] - values).abs().argmin(-1)
    read = (values[codes] * overall[:, None]).flatten()[: len(scales)] + offset
    tensors = {
        ".weight.absmax": codes.flatten()[: len(scales)].to(torch.uint8),
        ".weight.nested_absmax": overall,
        ".weight.nested_quant_map": values,
    }
    state = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    return tensors, read, state


def _grouped(
    weight_OI: Tensor, order_I: Tensor, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [I, O], zero points [G, O] and scales [G, O] in float16."""
    num_groups, most = int(order_I.max()) + 1, 2**bits - 1
    low, high = (
        torch.stack([at_most(weight_OI[:, order_I == g]) for g in range(num_groups)])
        for at_most in (lambda w: w.amin(1).clamp_max(0), lambda w: w.amax(1).clamp_min(0))
    )
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low).clamp_min(1e-3) / most).half()
    half = torch.full(low.shape, 1 << bits - 1)
    zeros = half if symmetric else (-low / scales.float()).round().int().clamp(1, most)
    codes = (weight_OI.T / scales.float()[order_I]).round() + zeros[order_I]
    return codes.clamp(0, most).int(), zeros.int(), scales


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, C] in words of 32 bits along the last dimension."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % count))
    shifts = torch.arange(count) * bits
    return (padded.unflatten(1, (-1, count)) << shifts).sum(-1).to(torch.int32)


def _e2m1(values: Tensor) -> Tensor:
    """The nearest codes, uint8."""
    known = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (values.abs()[..., None] - known).abs().argmin(-1).to(torch.uint8)
    return torch.where(values < 0, nearest | 8, nearest)


def _ct(layout: str, **weights: Any) -> dict[str, Any]:
    said = {key: value for key, value in weights.items() if key != "scale_dtype"}
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | said}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


def _packed(bits: int, group: int | None, *, symmetric: bool = True) -> Kind:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    said = f"groups of {group}" if group else "a scale for each row"
    zeros = "" if symmetric else ", with zero points"
    return Kind(
        compressed(PackedQuantizationCompressor, **weights),
        _ct("pack-quantized", **weights),
        f"packed int{bits}, {said}{zeros}",
    )


def _naive(
    layout: str, said: str, compressor: Any = NaiveQuantizationCompressor, **weights: Any
) -> Kind:
    return Kind(compressed(compressor, **weights), _ct(layout, **weights), said)


def _fp8(store: Callable[[Tensor], Stored], said: str, **entries: Any) -> Kind:
    return Kind(store, {"quant_method": "fp8"} | entries, f"fp8, {said}")


def _gptq(bits: int, group: int, config: Mapping[str, Any], **options: bool) -> Kind:
    said = f"gptq int{bits}, groups of {group}, in an order of its own"
    entries = {"quant_method": "gptq", "bits": bits, "group_size": group} | config
    return Kind(gptq(bits, group, **options), entries, said)


def _codebook(kind: str, dtype: torch.dtype, block: int = 64, *, nested: bool = False) -> Kind:
    entries = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    said = f"bitsandbytes {kind}, blocks of {block} numbers" + ", scales in 8 bits" * nested
    return Kind(
        codebook(kind, dtype, block=block, nested=nested),
        entries | {"bnb_4bit_use_double_quant": nested},
        said,
    )


# fmt: off
_CODEBOOKS = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * size / 12
        for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}
# fmt: on
_V2 = {"checkpoint_format": "gptq_v2"}
_INT8 = {"num_bits": 8, "type": "int"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float"}
_NVFP4 = _FLOAT4 | {"strategy": "tensor_group", "group_size": 16}
KINDS: Mapping[str, Kind] = {
    "fp8": _fp8(fp8_blocks(16, 16), "blocks of 16 x 16", weight_block_size=[16, 16]),
    "fp8-oblong": _fp8(fp8_blocks(16, 32), "blocks of 16 x 32", weight_block_size=[16, 32]),
    "fp8-ue8m0": _fp8(
        fp8_blocks(16, 16, power=True),
        "blocks of 16 x 16",
        weight_block_size=[16, 16],
        scale_fmt="ue8m0",
    ),
    "fp8-v4": _fp8(
        fp8_blocks(32, 32, suffix=".scale"), "blocks of 32 x 32", weight_block_size=[32, 32]
    ),
    "fp8-tensor": _fp8(fp8_whole(()), "a scale for the whole matrix", weight_block_size=None),
    "fp8-one": _fp8(fp8_whole((1,)), "a scale for the whole matrix", weight_block_size=None),
    "fp8-channel": _naive(
        "float-quantized", "fp8, a scale for each row", **_FLOAT8, strategy="channel"
    ),
    "fp8-ct-blocks": _naive(
        "float-quantized",
        "fp8, blocks of 16 x 16",
        **_FLOAT8,
        strategy="block",
        block_structure=[16, 16],
    ),
    "mxfp8": _naive(
        "mxfp8-quantized",
        "fp8, groups of 32",
        MXFP8QuantizationCompressor,
        **_FLOAT8,
        group_size=32,
        scale_dtype=torch.uint8,
    ),
    "int8": _naive("int-quantized", "int8, a scale for each row", **_INT8, strategy="channel"),
    "int4": _packed(4, 32),
    "int4-16": _packed(4, 16),
    "int4-zeros": _packed(4, 16, symmetric=False),
    "int4-channel": _packed(4, None),
    "packed-int8": _packed(8, 32),
    "packed-int8-zeros": _packed(8, None, symmetric=False),
    "gptq": _gptq(4, 32, {}),
    "gptq-act-order": _gptq(4, 16, {"desc_act": True}, ordered=True, symmetric=False),
    "gptq-v2": _gptq(4, 32, _V2, second=True, symmetric=False),
    "gptq-mislabelled": _gptq(4, 32, {"checkpoint_format": "gptq"}, second=True),
    "gptq-int8": _gptq(8, 32, _V2),
    "awq": Kind(
        awq(16), {"quant_method": "awq", "bits": 4, "group_size": 16}, "awq int4, groups of 16"
    ),
    "bnb-nf4": _codebook("nf4", torch.bfloat16),
    "bnb-fp4": _codebook("fp4", torch.float16),
    "bnb-nf4-nested": _codebook("nf4", torch.float32, nested=True),
    "mxfp4": Kind(mxfp4_blocks, {"quant_method": "mxfp4"}, "mxfp4, groups of 32"),
    "packed-mxfp4": _naive(
        "mxfp4-pack-quantized",
        "packed mxfp4, groups of 32",
        MXFP4PackedCompressor,
        **_FLOAT4,
        group_size=32,
    ),
    "deepseek-fp4": Kind(
        deepseek_fp4,
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        "mxfp4 of DeepSeek, groups of 32",
    ),
    "nvfp4": Kind(
        nvfp4_of_modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "nvfp4, groups of 16",
    ),
    "packed-nvfp4": _naive(
        "nvfp4-pack-quantized", "packed nvfp4, groups of 16", NVFP4PackedCompressor, **_NVFP4
    ),
}
