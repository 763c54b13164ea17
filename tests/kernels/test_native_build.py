"""The native library builds where it can and says in one line why not where it cannot; a library that is stale, damaged
or of another XLA is not used, and that too is one line."""

import logging
import shlex
import shutil
import subprocess

import jax
import pytest

from specserve.kernels import native
from specserve.kernels.native import build


def _has_compiler() -> bool:
    try:
        return bool(build.find_compiler())
    except build.NotBuilt:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler here")
TINY = '#include "library.h"\nSPECSERVE_EXPORT const char* specserve_kernels_instruction_set() { return "tiny"; }\n'


@pytest.fixture
def folder(tmp_path):
    """The sources of a library that compiles in a moment."""
    for name in ("library.cc", "library.h"):
        shutil.copy(build.FOLDER / name, tmp_path)
    (tmp_path / "tiny.cc").write_text(TINY)
    return tmp_path


def _is_refused(loaded: native.Native) -> bool:
    return loaded.library is None and loaded.text.count("\n") == 0


@needs_compiler
def test_what_is_built_is_used(folder):
    assert build.build_or_say(folder, folder) is None
    assert native.load(folder, ()).text == "tiny"


@needs_compiler
def test_an_installed_wheel_has_no_sources_to_compare(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("wheel")
    assert build.build_or_say(folder, elsewhere) is None
    assert native.load(elsewhere, ()).text == "tiny"
    assert not (folder / build.LIBRARY).exists()


@needs_compiler
@pytest.mark.parametrize("variant", build.VARIANTS)
def test_a_variant_is_compiled_with_its_flags_and_on_its_machine_alone(folder, variant):
    machine, flags = build.VARIANTS[variant]
    macros = [f"defined(__{flag.removeprefix('-m').upper()}__)" for flag in flags] or ["1"]
    (folder / f"some_{variant}.cc").write_text(f"#if !({' && '.join(macros)})\n#error without its flags\n#endif\n")
    assert build.build_or_say(folder, folder) is None
    assert (folder / f"some_{variant}.cc" in build.sources(folder)) == (machine == build.machine())


@needs_compiler
def test_a_compiler_that_does_not_know_a_new_flag_builds_without_it(folder, tmp_path, monkeypatch):
    older = tmp_path / "older"
    refuse = "".join(f'[ "$word" != {flag} ] || exit 1\n' for flag in build.NEW_FLAGS)
    older.write_text(f'#!/bin/sh\nfor word; do\n{refuse}done\nexec {shlex.join(build.find_compiler())} "$@"\n')
    older.chmod(0o755)
    monkeypatch.setenv("CXX", str(older))
    for variant, (machine, flags) in build.VARIANTS.items():
        if machine == build.machine() and set(flags) & set(build.NEW_FLAGS):
            (folder / f"some_{variant}.cc").write_text("")
    assert build.build_or_say(folder, folder) is None
    assert native.load(folder, ()).text == "tiny"


@needs_compiler
def test_a_broken_source_is_one_line_and_no_library(folder):
    build.build(folder)
    (folder / "tiny.cc").write_text(TINY + "this is no C++;\n")
    line = build.build_or_say(folder, folder)
    assert line is not None
    assert "\n" not in line
    assert "tiny.cc" in line
    assert "error" in line
    assert native.load(folder, ()) == native.Native(None, f"not built: {line}")
    (folder / "tiny.cc").write_text(TINY)
    assert build.build_or_say(folder, folder) is None
    assert native.load(folder, ()).library is not None


def test_without_a_compiler_there_is_one_line_with_the_fix(folder, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    line = build.build_or_say(folder, folder)
    assert line is not None
    assert line.startswith("no C++ compiler when specserve was installed")
    assert "apt install g++" in line
    assert native.load(folder, ()) == native.Native(None, f"not built: {line}")


def test_a_compiler_that_cannot_be_run_is_one_line(folder, monkeypatch):
    fake = folder / "g++"
    fake.write_text("no program")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    line = build.build_or_say(folder, folder)
    assert line is not None
    assert "\n" not in line


def test_what_was_never_installed_says_so(tmp_path):
    loaded = native.load(tmp_path, ())
    assert _is_refused(loaded)
    assert loaded.text.startswith("not built: ")


@needs_compiler
@pytest.mark.parametrize("name", ["tiny.cc", "library.h", "new.h"])
def test_a_library_of_other_sources_is_stale(folder, name):
    build.build(folder)
    with (folder / name).open("a") as file:
        file.write("// changed\n")
    loaded = native.load(folder, ())
    assert _is_refused(loaded)
    assert loaded.text.startswith("stale: ")
    assert build.AGAIN in loaded.text


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.002, 0.2, 0.5, 0.9, 0.9999])
def test_a_library_that_was_cut_off_is_not_used(folder, share):
    path = build.build(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    loaded = native.load(folder, ())
    assert _is_refused(loaded)
    assert build.AGAIN in loaded.text


@needs_compiler
def test_a_symbol_that_is_nowhere_is_one_line(folder):
    (folder / "tiny.cc").write_text(TINY + "void nowhere();\nSPECSERVE_EXPORT void call() { nowhere(); }\n")
    line = build.build_or_say(folder, folder)  # some linkers say it, others leave it to the loader
    loaded = native.load(folder, ())
    assert _is_refused(loaded)
    assert "nowhere" in (line or loaded.text)


@needs_compiler
def test_a_handler_that_is_missing_is_one_line(folder):
    build.build(folder)
    loaded = native.load(folder, ("nobody",))
    assert _is_refused(loaded)
    assert "nobody" in loaded.text


@needs_compiler
def test_a_library_for_a_newer_xla_is_refused_and_the_backend_lives(folder):
    (folder / "tiny.cc").write_text(
        TINY
        + """#include "xla/ffi/api/c_api.h"
        SPECSERVE_EXPORT XLA_FFI_Error* from_the_future(XLA_FFI_CallFrame* call) {
          auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(call->extension_start);
          asked->metadata->api_version.major_version = 99;
          return nullptr;
        }
        """
    )
    build.build(folder)
    loaded = native.load(folder, ("from_the_future",))
    assert _is_refused(loaded)
    assert "version (99." in loaded.text
    assert jax.numpy.arange(3).sum() == 3


def test_the_reason_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native, "_native", lambda: native.load(tmp_path, ()))
    native._warn.cache_clear()
    with caplog.at_level(logging.WARNING, native.logger.name):
        assert not native.is_available()
        assert native.describe().startswith("not built: ")
        assert not native.is_available()
    native._warn.cache_clear()
    assert len(caplog.messages) == (jax.default_backend() == "cpu")


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm here")
def test_code_for_newer_processors_is_called_by_name_alone(tmp_path):
    """The linker keeps one of all copies of an inline function. Were it one compiled for AVX, code that runs on every
    processor would call it."""
    for source in build.sources():
        if source.stem.rpartition("_")[2] not in build.VARIANTS:
            continue
        made = tmp_path / f"{source.stem}.o"
        subprocess.run(build.compile_command(build.find_compiler(), source, made), check=True)
        symbols = subprocess.run(["nm", "-C", made], check=True, capture_output=True, text=True).stdout.splitlines()
        shared = [line for line in symbols if line[17:18] in "WVu"]
        assert not shared, f"{source.name} leaves inline functions of its own:\n" + "\n".join(shared)
