"""A target served by llama.cpp and by specserve, asked the same in turns (benchmarks/README.md).

    python benchmarks/llama_cpp.py --rounds 3 --clients 1,4 --output peers.json

The first run builds llama.cpp for this processor. It needs a package index, a C++ compiler, a quarter of an hour on two
cores, and 2 GB in the cache folder.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from environments import environment, run, say
from over_http import CONTEXT, free_port, main
from side_by_side import PLAIN, Arm, BenchmarkError, Server

PACKAGES = ("cmake", "ninja", "torch==2.13.0", "transformers", "gguf", "sentencepiece")  # to build it, and to convert
SOURCE = "llama-cpp-python==0.3.36"  # its sdist has the whole of llama.cpp
QUANTIZED = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q4_k_m": "Q4_K_M"}  # formats that its converter does not write
CONVERTER = Path(__file__).with_name("convert_for_llama_cpp.py")  # run in its environment, where specserve is not
LOOKUP = "lookup"  # its own speculation without a head, from what stands in the text
# Bytes of a weight; 32 of them share a 16-bit scale, and in q4_1 as large a minimum. q4_k_m mixes 4.5 and 6.6 bits.
BYTES = {"f32": 4.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q4_k_m": 0.63}
BUILD = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF")
BUILD += ("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")


class LlamaCpp:
    """llama.cpp as its default build makes it for the processor at hand, built once for each kind of processor."""

    name = "llama.cpp"
    weight_bytes: Mapping[str, float] = BYTES

    def __init__(self, folder: Path) -> None:
        from specserve.host import processor

        self.folder, self.python = folder, environment(folder, PACKAGES, needs=SOURCE)
        self.source = folder / SOURCE.replace("==", "-")
        if not (self.source / "CMakeLists.txt").is_file():
            self._fetch()
        build = folder / f"build-{hashlib.sha256(processor().encode()).hexdigest()[:8]}"
        self.programs = build / "bin"
        if not (self.programs / "llama-server").is_file():
            self._build(build)

    def _fetch(self) -> None:
        say(f"fetching llama.cpp into {self.folder}, once")
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "download", "--no-binary", ":all:", "--no-deps"]
        run([*pip, "--dest", self.folder, SOURCE], self.folder / "pip.log", "pip download (it needs a network)")
        (sdist,) = self.folder.glob("llama_cpp_python-*.tar.gz")
        partial = self.folder / "source.part"
        with tarfile.open(sdist) as archive:
            for member in archive:
                _, is_inside, member.name = member.name.partition("/vendor/llama.cpp/")
                if is_inside:
                    archive.extract(member, partial, filter="data")
        shutil.rmtree(self.source, ignore_errors=True)
        partial.rename(self.source)
        sdist.unlink()

    def _build(self, build: Path) -> None:
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            raise BenchmarkError("there is no C++ compiler to build llama.cpp with: install one (apt install g++)")
        say(f"building llama.cpp in {build}, once")
        log, tools = self.folder / "build.log", self.python.parent
        configure = [tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *BUILD]
        run([*configure, "-S", self.source, "-B", build], log, "configuring llama.cpp")
        run(
            [tools / "cmake", "--build", build, "--target", "llama-server", "llama-quantize"], log, "building llama.cpp"
        )

    def file(self, target: Path, weights: str) -> Path:
        return self.convert(target, weights)

    def convert(self, source: Path, weights: str, target: Path | None = None) -> Path:
        """Convert a model folder, or a head for `target`, to GGUF."""
        from specserve.provenance import fingerprint

        file = self.folder / f"{fingerprint(source)}-{weights}.gguf"
        if not file.is_file():
            whole = self.convert(source, "f32", target) if weights in QUANTIZED else None
            say(f"converting {source} to {weights}")
            part = file.with_suffix(".part")
            if whole:
                command = [self.programs / "llama-quantize", whole, part, QUANTIZED[weights]]
            else:
                of_target = ["--target-model-dir", target] if target else []
                command = [self.python, CONVERTER, self.source, source, *of_target]
                command += ["--outtype", weights, "--outfile", part]
            run(command, self.folder / "convert.log", f"converting {source}")
            part.rename(file)
        return file

    def describe(self) -> str:
        found = subprocess.run([self.programs / "llama-server", "--version"], capture_output=True, text=True)
        return f"{self.name} of {SOURCE}, {' '.join((found.stdout + found.stderr).split())}"

    def servers(self, options: argparse.Namespace, target: Path) -> Iterator[Server]:
        slots, threads = max(options.clients), str(options.threads)
        for weights in options.formats:
            model = self.convert(target, weights)
            heads: dict[str, tuple[str, ...]] = {PLAIN: ()}
            if options.lookup:
                heads[LOOKUP] = ("--spec-type", "ngram-simple")
            chains = [name for name in options.speculation if name.startswith("chain:")]
            if options.draft and chains:
                try:
                    head = str(self.convert(options.draft, weights, target))
                    flags = "--spec-type", "draft-eagle3", "--spec-draft-model", head, "--spec-draft-threads", threads
                    heads |= {name: (*flags, "--spec-draft-n-max", name.partition(":")[2]) for name in chains}
                except BenchmarkError as error:
                    say(f"llama.cpp goes without a head: {error}")
            for speculation, head_flags in heads.items():
                port = free_port()
                command = [str(self.programs / "llama-server"), "--model", str(model), "--port", str(port)]
                command += ["--parallel", str(slots), "--ctx-size", str(CONTEXT * slots)]
                command += ["--threads", threads, "--threads-batch", threads, "--no-cache-prompt", "--cache-ram", "0"]
                command += ["--no-ui", "--fit", "off", *head_flags]
                arm = Arm(self.name, weights, speculation)
                say(f"starting {arm}")
                yield Server(arm, port, command, self.folder, {"PYTHONPATH": ""}, has_salt=False)


if __name__ == "__main__":
    sys.exit(main(LlamaCpp, "llama_cpp", BYTES, __doc__ or ""))
