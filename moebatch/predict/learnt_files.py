"""What predictors have learnt of a model, kept beside it.

Shape letters: L MoE layers, D hidden, E experts, V vocabulary, W width.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.predict.array_file import is_whole
from moebatch.predict.guesser import LearnedGuesser, Perceptron, TokenGuesser
from moebatch.predict.owner import Arrays, Kind

_REMEDY = "moebatch calibrate {folder} --text FILE --predictor "
TOKENS = Kind(title="token table", file="tokens", version=1, remedy=_REMEDY + "token")
LEARNED = Kind(title="learned predictor", file="learned", version=2, remedy=_REMEDY + "learned")
FIRST_GATE = Kind(title="first gate", file="first-gate", version=1, remedy=_REMEDY + "next-gate")


def save_tokens(path: Path, shares_LVE: NDArray[np.float16], owner: ModelOwner) -> None:
    """Writes a token table. Raises StorageError."""
    TOKENS.save(path, owner, {"shares": shares_LVE})


def load_tokens(path: Path, owner: ModelOwner, *, vocab_size: int) -> TokenGuesser:
    """A token table of that model. Raises CheckpointError."""
    arrays, _ = TOKENS.load(path, owner)
    size = (len(owner.moe_layers), vocab_size, owner.num_experts)
    if _sizes(arrays) != {"shares": (size, "float16")}:
        raise TOKENS.refusal(path, owner, "its shares are not those of the model's vocabulary")
    return TokenGuesser(arrays["shares"])


def save_learned(path: Path, guesser: LearnedGuesser, owner: ModelOwner) -> None:
    """Writes the perceptrons of all layers. Raises StorageError."""
    arrays = {
        f"{place}.{name}": tensor.to(torch.float16).numpy()
        for place, perceptron in _by_place(guesser).items()
        for name, tensor in zip(Perceptron._fields, perceptron, strict=True)
    }
    LEARNED.save(path, owner, arrays, stride=guesser.stride)


def load_learned(path: Path, owner: ModelOwner, *, hidden_size: int) -> LearnedGuesser:
    """Perceptrons of that model, in float32. Raises CheckpointError."""
    arrays, description = LEARNED.load(path, owner)
    num_layers, stride = len(owner.moe_layers), description.get("stride")
    if not isinstance(stride, int) or not is_whole(stride) or not 1 <= stride <= num_layers:
        raise LEARNED.refusal(path, owner, "its description is damaged")

    def perceptron(place: str, input_size: int) -> Perceptron:
        width = len(arrays.get(f"{place}.bias_W", ()))
        sizes = (
            ("into_WD", (width, input_size)),
            ("bias_W", (width,)),
            ("out_EW", (owner.num_experts, width)),
            ("bias_E", (owner.num_experts,)),
        )
        wanted = {f"{place}.{name}": (size, "float16") for name, size in sizes}
        found = {name: of for name, of in _sizes(arrays).items() if name in wanted}
        if found != wanted:
            raise LEARNED.refusal(path, owner, f"perceptron {place} is damaged")
        return Perceptron(*(torch.from_numpy(arrays[name]).float() for name in wanted))

    return LearnedGuesser(
        [perceptron(f"ahead.{position}", hidden_size) for position in range(num_layers)],
        [perceptron(f"beginning.{position}", 2 * hidden_size) for position in range(stride)],
        owner.experts_per_token,
    )


def _by_place(guesser: LearnedGuesser) -> dict[str, Perceptron]:
    kinds = {"ahead": guesser.ahead, "beginning": guesser.beginning}
    return {
        f"{kind}.{position}": perceptron
        for kind, perceptrons in kinds.items()
        for position, perceptron in enumerate(perceptrons)
    }


def save_first_gate(path: Path, gate_ED: Tensor, owner: ModelOwner) -> None:
    """Writes the gate for the first layer of the next token. Raises StorageError."""
    FIRST_GATE.save(path, owner, {"gate": gate_ED.to(torch.float16).numpy()})


def load_first_gate(path: Path, owner: ModelOwner, *, hidden_size: int) -> Tensor:
    """That gate of that model, [E, D] in float32. Raises CheckpointError."""
    arrays, _ = FIRST_GATE.load(path, owner)
    if _sizes(arrays) != {"gate": ((owner.num_experts, hidden_size), "float16")}:
        raise FIRST_GATE.refusal(path, owner, "it is not of the model's size")
    return torch.from_numpy(arrays["gate"]).float()


def _sizes(arrays: Arrays) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
