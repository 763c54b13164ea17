"""A GGUF file shown as a Hugging Face folder in the user's cache: its config, its tokenizer, and a link to itself. All
that reads targets reads it there."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from gguf.constants import GGMLQuantizationType

from specserve.checkpoints.gguf.config import read_config
from specserve.checkpoints.gguf.container import GgufFile, making_sense, read_gguf
from specserve.checkpoints.gguf.tokenizer import end_ids, read_tokenizer, tokenizer_config
from specserve.checkpoints.tensors import CONFIG, GGUF_FILE
from specserve.errors import CheckpointError
from specserve.host import cache_folder, whole_file
from specserve.models.families.table import model_config

Texts = Callable[[GgufFile], Mapping[str, str]]  # the files of a folder that shows one, by name


def show_as_folder(path: Path, texts: Texts | None = None) -> Path:
    """Return the folder that shows a file, written anew: a target's, unless others make its texts. Raises
    CheckpointError and ConfigError for a file that is not understood."""
    path = path.resolve()
    state = path.stat()
    return _show(path, state.st_size, state.st_mtime_ns, texts or _texts_of_target)


@functools.cache
def _show(path: Path, size: int, changed: int, make_texts: Texts) -> Path:
    file = read_gguf(path)
    with making_sense(path):
        texts = make_texts(file)
    digest = hashlib.sha256(f"{path} {size} {changed} {make_texts.__name__}".encode()).hexdigest()
    folder = cache_folder() / "gguf" / f"{path.stem}-{digest[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with whole_file(folder / name, is_shared=True) as partial:
                partial.write_text(text + "\n", "utf-8")
        with whole_file(folder / GGUF_FILE, is_shared=True) as partial:
            partial.symlink_to(file.path)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot write what shows {path} as a model folder ({error})") from error
    return folder


def _texts_of_target(file: GgufFile) -> Mapping[str, str]:
    raw, ends = read_config(file, warns=True), end_ids(file)
    model_config(raw, dtype="float32", where=str(file.path))
    if any(tensor.kind is GGMLQuantizationType.BF16 for tensor in file.tensors.values()):
        raw["dtype"] = "bfloat16"
    begins = file.values.get("tokenizer.ggml.bos_token_id")
    raw |= {"bos_token_id": begins} if begins is not None else {}
    raw |= {"eos_token_id": ends[0]} if ends else {}
    settings, tokenizer = tokenizer_config(file), read_tokenizer(file)
    return {
        CONFIG: json.dumps(raw, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": ends}),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
        "tokenizer.json": tokenizer.to_str(),
    }
