"""A target served by llama.cpp and by specserve, asked the same in turns (benchmarks/README.md).

    python benchmarks/llama_cpp.py --rounds 3 --clients 1,4 --output peers.json

The first run makes an environment for llama.cpp: it needs a package index, and about 1.5 GB in the cache folder.
"""

import argparse
import importlib
import runpy
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from environments import environment, run, say
from over_http import CONTEXT, free_port, main
from side_by_side import PLAIN, Arm, BenchmarkError, Server

PACKAGES = ("xllamacpp", "torch==2.13.0", "transformers", "gguf", "sentencepiece")
CONVERTER = "llama-cpp-python==0.3.36"  # its sdist has llama.cpp's converter, which no wheel has
FOUR_BITS = {"q4_0": "Q4_0", "q4_1": "Q4_1"}  # as llama.cpp names them
LOOKUP = "lookup"  # its own speculation without a head, from what stands in the text
# Bytes of a weight; 32 of them share a 16-bit scale, and in q4_1 as large a minimum.
BYTES = {"f32": 4.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32}


class LlamaCpp:
    """llama.cpp in an environment of its own, made once."""

    name = "llama.cpp"
    weight_bytes: Mapping[str, float] = BYTES

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, environment(folder, PACKAGES, needs=CONVERTER)
        if (folder / "llama.cpp" / "convert_hf_to_gguf.py").is_file():
            return
        say(f"fetching llama.cpp's converter into {folder}, once")
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "download", "--no-binary", ":all:", "--no-deps"]
        run([*pip, "--dest", folder, CONVERTER], folder / "pip.log", "pip download (it needs a network)")
        (sdist,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(sdist) as archive:
            for member in archive:
                _, is_inside, member.name = member.name.partition("/vendor/llama.cpp/")
                if is_inside and member.name.endswith(".py"):
                    archive.extract(member, folder / "llama.cpp", filter="data")
        sdist.unlink()

    def convert(self, source: Path, weights: str, target: Path | None = None) -> Path:
        """Convert a model folder, or a head for `target`, to GGUF."""
        from specserve.provenance import fingerprint

        file = self.folder / f"{fingerprint(source)}-{weights}.gguf"
        if not file.is_file():
            say(f"converting {source} to {weights}")
            of_target = ["--target-model-dir", target] if target else []
            part = file.with_suffix(".part")
            command = [self.python, __file__, "_convert", self.folder / "llama.cpp", source, *of_target]
            command += ["--outtype", weights, "--outfile", part]
            if weights in FOUR_BITS:
                whole = self.convert(source, "f32", target)
                command = [self.python, __file__, "_quantize", self.folder / "llama.cpp", whole, weights, part]
            run(command, self.folder / "convert.log", f"converting {source}")
            part.rename(file)
        return file

    def describe(self) -> str:
        code = "import xllamacpp as x; print(x.__version__, '|', x.get_system_info().strip(' |'))"
        return self.name + ", xllamacpp " + subprocess.check_output([self.python, "-c", code], text=True).strip()

    def servers(self, options: argparse.Namespace, target: Path) -> Iterator[Server]:
        slots = max(options.clients)
        for weights in options.formats:
            model = self.convert(target, weights)
            heads: dict[str, tuple[str, ...]] = {PLAIN: ()}
            if options.lookup:
                heads[LOOKUP] = ("", LOOKUP)
            chains = [name for name in options.speculation if name.startswith("chain:")]
            if options.draft and chains:
                try:
                    head = self.convert(options.draft, weights, target)
                    heads |= {name: (str(head), name.partition(":")[2]) for name in chains}
                except BenchmarkError as error:
                    say(f"llama.cpp goes without a head: {error}")
            for speculation, head_of in heads.items():
                port = free_port()
                command = [str(self.python), __file__, "_serve", str(model), str(port), str(slots)]
                command += [str(options.threads), *head_of]
                arm = Arm(self.name, weights, speculation)
                say(f"starting {arm}")
                yield Server(arm, port, command, self.folder, {"PYTHONPATH": ""}, has_salt=False)


def convert_here(llama_cpp: str, *arguments: str) -> None:
    """Run llama.cpp's converter in the peer's environment. It knows tokenizers by a hash, and not pydoc's."""
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


def quantize_here(llama_cpp: str, whole: str, weights: str, part: str) -> None:
    """Write a float32 file of llama.cpp's again with its matrices in 4 bits, the embedding too, in the peer's
    environment: llama.cpp's converter stops at 8."""
    sys.path.insert(0, f"{llama_cpp}/gguf-py")
    gguf = importlib.import_module("gguf")
    kind = getattr(gguf.GGMLQuantizationType, FOUR_BITS[weights])
    file_type = getattr(gguf.LlamaFileType, f"MOSTLY_{FOUR_BITS[weights]}")
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(part, arch=reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = tensor.data
        if len(tensor.shape) == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_here(model: str, port: str, slots: str, threads: str, head: str = "", chain: str = "") -> None:
    """Run llama.cpp's HTTP server in the peer's environment, until it is killed."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_parallel, params.n_ctx = model, int(port), int(slots), CONTEXT * int(slots)
    params.hostnames = ["127.0.0.1"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.cache_prompt, params.cache_ram_mib, params.ui, params.fit_params = False, 0, False, False
    if chain == LOOKUP:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    elif head:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = head, int(chain)
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["_convert", *rest]:
            convert_here(*rest)
        case ["_quantize", *rest]:
            quantize_here(*rest)
        case ["_serve", *rest]:
            serve_here(*rest)
        case _:
            sys.exit(main(LlamaCpp, "llama_cpp", BYTES, __doc__ or ""))
