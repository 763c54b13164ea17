"""A target as people have one, in a folder: random weights, a tokenizer, a chat template; and data to train it on."""

import json
import shutil
from pathlib import Path

import chats
import tiny

FAMILY = "qwen2.5"


def write_folder(folder: Path) -> Path:
    """Give the folder of a random target that chats."""
    folder.mkdir(parents=True)
    vocabulary, end = chats.vocabulary(), chats.FAMILIES[FAMILY]["eos_token"]
    raw = tiny.TARGET | {
        "vocab_size": vocabulary.get_vocab_size(),
        "eos_token_id": vocabulary.token_to_id(end),
        "num_hidden_layers": 2,
    }
    tiny.write_target(folder, raw, seed=0)
    shutil.copy(chats.FOLDER / "tokenizer.json", folder)
    shutil.copy(chats.FOLDER / f"{FAMILY}.jinja", folder / "chat_template.jinja")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_mixture(path: Path, number: int = 60) -> Path:
    """Give a file of questions with somebody's answers. One question in 25 is held out."""
    turns = [[("user", f"what is {i} plus one?"), ("assistant", "old")] for i in range(number)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
