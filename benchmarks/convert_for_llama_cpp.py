"""llama.cpp's converter, run in the environment that `llama_cpp.py` makes for it, in which specserve is not installed.

python benchmarks/convert_for_llama_cpp.py FOLDER_OF_LLAMA_CPP MODEL_FOLDER [OPTIONS OF THE CONVERTER]
"""

import importlib
import runpy
import sys
from typing import Any


def convert(llama_cpp: str, *arguments: str) -> None:
    """Run the converter. It knows tokenizers by a hash, and not pydoc's."""
    # in place of this folder, whose kernels.py transformers would import
    sys.path[:1] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    base = importlib.import_module("conversion.base").TextModel
    known = base.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "qwen2"  # splits text as pydoc's tokenizer does

    base.get_vocab_base_pre = named
    sys.argv = [f"{llama_cpp}/convert_hf_to_gguf.py", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    convert(*sys.argv[1:])
