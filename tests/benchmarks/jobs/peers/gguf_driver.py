"""A checkpoint as GGUF without a vocabulary, by llama.cpp's own converter.

    python -m tests.benchmarks.jobs.peers.gguf_driver MODEL OUT.gguf LLAMA_CPP

The last is a folder of llama.cpp's sources. Runs in our environment, which has what the converter
needs.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, sys.argv[3])
    importlib.import_module("convert_hf_to_gguf")  # brings the sources' own gguf
    conversion = importlib.import_module("conversion")
    gguf = importlib.import_module("gguf")
    hparams = conversion.ModelBase.load_hparams(folder, False)
    kind = conversion.ModelType.TEXT
    convert: Any = conversion.get_model_class(conversion.get_model_architecture(hparams, kind))

    def set_vocab(model: Any) -> None:
        model.gguf_writer.add_tokenizer_model("no_vocab")
        model.gguf_writer.add_vocab_size(hparams["vocab_size"])

    convert.set_vocab = set_vocab
    convert.no_mtp = True  # for families that may predict several tokens; these checkpoints do not
    convert(folder, gguf.LlamaFileType.MOSTLY_BF16, target).write()


if __name__ == "__main__":
    main()
